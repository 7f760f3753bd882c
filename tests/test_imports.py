"""Imports run one way: services import libs, never each other; libs import no service; keptset imports libs.

Read from the source, imports inside functions included.
"""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LIBS = {"kept_tokens", "kept_loss", "keptset_guards", "keptset_settings"}
SERVICES = {"keptset_inference", "keptset_orchestrator", "keptset_trainer"}
OURS = LIBS | SERVICES | {"keptset"}

FOLDERS = {
    "kept_tokens": "libs/kept_tokens",
    "kept_loss": "libs/kept_loss",
    "keptset_guards": "libs/guards",
    "keptset_settings": "libs/settings",
    "keptset_inference": "services/inference",
    "keptset_orchestrator": "services/orchestrator",
    "keptset_trainer": "services/trainer",
    "keptset": "deploy/local",
}

ALLOWED_OURS = {
    "kept_tokens": set(),
    "kept_loss": set(),
    "keptset_guards": set(),
    "keptset_settings": set(),
    "keptset_inference": LIBS,
    "keptset_orchestrator": {
        "kept_tokens",
        "keptset_guards",
        "keptset_settings",
    },  # kept_loss would bring torch
    "keptset_trainer": LIBS,
    "keptset": LIBS,
}

FEW_THIRD_PARTIES = {
    "kept_tokens": {"numpy", "msgspec"},
    "kept_loss": {"torch", "triton", "jaxtyping"},
    "keptset_guards": set(),
    "keptset_settings": {"pydantic", "pydantic_settings", "pydantic_core", "tomli_w"},
}
"""What somebody else's project would install with them."""

DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "pydantic_settings": "pydantic-settings"}
DISTRIBUTIONS |= {"kept_tokens": "kept-tokens", "kept_loss": "kept-loss", "tomli_w": "tomli-w"}
DISTRIBUTIONS |= {"keptset_settings": "keptset-settings", "keptset_guards": "keptset-guards"}
COMES_WITH = {
    "pydantic": "pydantic-settings",
    "pydantic_core": "pydantic-settings",
    "starlette": "fastapi",
    "triton": "torch",
}


def imported(package: str) -> dict[str, set[str]]:
    """Top-level modules that a package imports, each with the files that do."""
    source = ROOT / FOLDERS[package] / "src" / package
    found: dict[str, set[str]] = {}
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(path.relative_to(source).as_posix())
    return {name: files for name, files in found.items() if name not in sys.stdlib_module_names}


@pytest.fixture(scope="module")
def imports():
    return {package: imported(package) for package in OURS}


def test_every_package_of_the_repository_is_known():
    found = {path.parent.name for path in ROOT.glob("*/*/src/*/__init__.py")}
    assert found == OURS


def test_imports_run_one_way(imports):
    wrong = [
        f"{package} imports {name} in {sorted(files)}"
        for package, found in imports.items()
        for name, files in found.items()
        if name in OURS - {package} - ALLOWED_OURS[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", FEW_THIRD_PARTIES)
def test_libs_bring_little_along(imports, package):
    assert imports[package].keys() - {package} <= FEW_THIRD_PARTIES[package]


IN_THE_ENGINE = "capture/"
"""Runs inside the engine's processes; only this part of the inference service handles tensors."""


def test_torch_stays_where_tensors_are(imports):
    users = {package for package, found in imports.items() if "torch" in found}
    assert users <= {"kept_loss", "keptset_trainer", "keptset_inference"}
    assert not [file for file in imports["keptset_inference"]["torch"] if not file.startswith(IN_THE_ENGINE)]


def test_vllm_stays_in_inference(imports):
    assert {package for package, found in imports.items() if "vllm" in found} == {"keptset_inference"}


def test_transformers_stays_in_the_trainer(imports):
    assert {package for package, found in imports.items() if "transformers" in found} <= {"keptset_trainer"}


@pytest.mark.parametrize("package", sorted(OURS))
def test_what_is_imported_is_declared(imports, package):
    project = tomllib.loads((ROOT / FOLDERS[package] / "pyproject.toml").read_text())["project"]
    declared = {
        requirement.partition(">")[0].partition("=")[0].partition("[")[0].strip()
        for requirement in project.get("dependencies", [])
    }
    # vllm is one package under two names, so it stands in the pins of a profile; the others come with it.
    by_profile = {"vllm", "torch", "triton", "huggingface_hub"} if package == "keptset_inference" else set()
    used = imports[package].keys() - {package} - by_profile
    undeclared = {
        name: imports[package][name]
        for name in used
        if not {DISTRIBUTIONS.get(name, name), COMES_WITH.get(name)} & declared
    }
    assert not undeclared
