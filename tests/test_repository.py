"""The repository speaks of itself only, in files that one can read."""

import csv
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 400


def tracked() -> list[Path]:
    """Files of the repository, without those that git has lost meanwhile."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every text file of the repository by its path."""
    found = {}
    for path in tracked():
        try:
            found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    assert len(found) > 50
    return found


def test_no_file_is_too_long_to_read(texts):
    long = {
        name: lines
        for name, text in texts.items()
        if name.endswith((".py", ".sh", ".toml")) and (lines := text.count("\n")) >= MOST_LINES
    }
    assert not long


def test_no_path_of_somebodys_machine(texts):
    pattern = re.compile(rf"{re.escape(str(ROOT))}\b|/home/\w+/|/Users/\w+/|/root/")
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts.items()
        if name != "tests/test_repository.py"
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found


def test_pins_name_versions_only(texts):
    pins = {name: text for name, text in texts.items() if re.fullmatch(r"deploy/pins/\w+/\w+\.txt", name)}
    assert len(pins) == 8
    wrong = [
        f"{name}: {line}"
        for name, text in pins.items()
        for line in text.splitlines()
        if not re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+( ;.*)?", line) or "://" in line
    ]
    assert not wrong


def test_no_two_pinned_distributions_bring_the_same_file():
    """Of the profile that is installed here: whichever came last would have its way."""
    owners: dict[str, list[str]] = {}
    for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info/RECORD"):
        for file, *_ in csv.reader(path.read_text().splitlines()):
            owners.setdefault(file, []).append(path.parent.name)
    assert len(owners) > 1000
    assert not {file: names for file, names in owners.items() if len(names) > 1}


def test_pins_hold_a_cuda_python_without_files_of_its_own(texts):
    """Since version 13: it has none, and names the cuda-bindings that it goes with."""
    for name in ("deploy/pins/cuda/local.txt", "deploy/pins/cuda/inference.txt"):
        versions = dict(line.split("==") for line in texts[name].splitlines() if line.startswith("cuda-"))
        assert int(versions["cuda-python"].split(".")[0]) >= 13
        assert versions["cuda-python"].split(".")[:2] == versions["cuda-bindings"].split(".")[:2]


def test_no_weights_are_in_the_repository():
    heavy = {path.name: path.stat().st_size for path in tracked() if path.stat().st_size > 1_000_000}
    assert not heavy
    assert not [path for path in tracked() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")]


def test_the_table_of_settings_is_the_one_that_the_code_prints(texts):
    command = [sys.executable, "-m", "keptset_settings"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert printed.startswith("|")
    documents = [name for name, text in texts.items() if name.endswith(".md") and printed in text]
    assert documents, f"no document holds what `{' '.join(command[1:])}` prints"


def test_links_between_documents_lead_somewhere(texts):
    links = [
        (name, target)
        for name, text in texts.items()
        if name.endswith(".md")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        if not target.startswith(("http://", "https://", "mailto:"))
    ]
    assert not [
        f"{name}: {target}" for name, target in links if not (ROOT / name).parent.joinpath(target).exists()
    ]
