"""The command `keptset` over stand-ins for the services: what it starts, shows, leaves and ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from keptset import groups
from keptset.__main__ import main

HERE = Path(__file__).parent
DEMO = HERE.parent / "reverse-text.toml"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty folder to be in, with stand-ins in place of the services."""
    for name in ("inference", "trainer", "orchestrator"):
        package = tmp_path / "fakes" / f"keptset_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(
            f"import runpy, sys\nsys.argv[1:1] = [{name!r}]\n"
            f"runpy.run_path({str(HERE / 'fake_service.py')!r}, run_name='__main__')\n"
        )
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    monkeypatch.setenv("COLUMNS", "200")
    return folder


@pytest.fixture
def keptset(work, capfd):
    """Runs the command in this process, which saves its imports; returns code, output, errors."""

    def call(*arguments, **variables):
        with pytest.MonkeyPatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            try:
                code = main([str(a) for a in arguments])
            except SystemExit as error:
                code = error.code
        return code, *capfd.readouterr()

    return call


def start(*arguments) -> "subprocess.Popen[str]":
    """Runs the command in a process of its own until its first step is done, which takes a minute."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keptset", *map(str, arguments)],
        env=os.environ | {"FAKE_ORCHESTRATOR": "slow"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any("step 1/30" in line for line in process.stdout)
    return process


def left_running(work: Path) -> list[str]:
    """Command lines of processes that were started for runs below `work`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").resolve() == work:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def test_a_run_from_start_to_end(keptset, work):
    code, out, err = keptset("run", DEMO, "--orchestrator.steps", 3)
    assert (code, err) == (0, "")
    assert "runs/models/reverse-text-4-12-seed0 made in" in out
    assert re.search(r"inference +healthy after .* s, http://127\.0\.0\.1:\d+", out)
    assert re.search(r"step 3/3 +reward 0\.3 +mismatch KL 1\.0e-09 +coverage 1", out)
    assert "0.1 at the first step, 0.3 at the last" in out
    run = work / "runs" / "reverse-text"
    for name in ("metrics.jsonl", "reward.png", "summary.json", "logs/inference.log", "logs/trainer.log"):
        assert (run / name).stat().st_size > 0
    assert json.loads((run / "summary.json").read_text())["reward/last"] == pytest.approx(0.3)
    configs = {path.stem: tomllib.loads(path.read_text()) for path in (run / "configs").iterdir()}
    assert configs.keys() == {"inference-0", "trainer", "orchestrator"}
    port = configs["inference-0"]["inference"]["port"]
    assert configs["orchestrator"]["orchestrator"]["inference_urls"] == [f"http://127.0.0.1:{port}"]
    assert left_running(work) == []


def test_a_second_run_leaves_the_first_alone(keptset, work):
    keptset("run", DEMO, "--orchestrator.steps", 1)
    code, out, _ = keptset("run", DEMO, "--orchestrator.steps", 2)
    assert code == 0
    assert "(cached)" in out
    rows = [len((work / "runs" / n / "metrics.jsonl").read_text().splitlines()) for n in NAMES]
    assert rows == [1, 2]
    config = tomllib.loads((work / "runs" / "reverse-text-2" / "configs" / "trainer.toml").read_text())
    assert "reverse-text-2" in config["trainer"]["weights_dir"]
    code, _, err = keptset("run", DEMO, "--name", "reverse-text")
    assert code == 1
    assert "--overwrite" in err


NAMES = ("reverse-text", "reverse-text-2")


@pytest.mark.parametrize("name", ["inference", "trainer", "orchestrator"])
def test_a_service_that_dies_at_start_is_named(keptset, name, work):
    code, _, err = keptset("run", DEMO, **{f"FAKE_{name.upper()}": "exit"})
    assert code == 1
    # The trainer is also what makes the model, and fails there first.
    died = "warm start" if name == "trainer" else name
    assert f"{died} died (exit code 1); the end of " in err
    assert f"  | {name}: cannot start" in err
    assert "Traceback" not in err
    assert left_running(work) == []


def test_a_run_whose_ratios_were_wrong_at_one_step_fails_and_keeps_its_report(keptset, work):
    code, out, err = keptset("run", DEMO, "--orchestrator.steps", 4, FAKE_ORCHESTRATOR="wrong")
    assert code == 1
    assert "0.4 at step 3" in err.replace("0.400", "0.4")
    assert "broken" in err
    assert (work / "runs" / "reverse-text" / "summary.json").exists()
    assert "reward.png" in out


def test_an_orchestrator_that_dies_midway_fails_the_run(keptset):
    code, out, err = keptset("run", DEMO, FAKE_ORCHESTRATOR="late")
    assert code == 1
    assert "step 1/30" in out
    assert "orchestrator died (exit code 1)" in err
    assert "  | orchestrator: something broke" in err


def test_an_orchestrator_that_stops_early_fails_the_run(keptset):
    code, _, err = keptset("run", DEMO, "--orchestrator.steps", 3, FAKE_ORCHESTRATOR="short")
    assert code == 1
    assert "ended after 2 of 3 steps" in err


def test_waiting_is_bounded_and_says_for_whom(keptset, work):
    arguments = ("run", DEMO, "--orchestrator.startup_timeout", 2)
    code, _, err = keptset(*arguments, FAKE_TRAINER="sick")
    assert code == 1
    assert re.search(r"waited 2 s for the health of trainer at http://\S+ \(HTTP 503: still loading\)", err)
    assert left_running(work) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing_running(work, number):
    with start("run", DEMO) as process:
        assert len(left_running(work)) >= 5
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    assert left_running(work) == []


def test_a_killed_run_leaves_nothing_running(work):
    with start("run", DEMO) as process:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 10
    while left_running(work):
        assert time.monotonic() < deadline, left_running(work)
        time.sleep(0.05)


def test_a_taken_port_fails_before_anything_starts(keptset, work):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, _, err = keptset("run", DEMO, "--trainer.port", port)
    assert code == 1
    assert f"trainer.port = {port}" in err
    assert not (work / "runs").exists()


def test_one_port_for_two_services_is_refused(keptset):
    code, _, err = keptset("run", DEMO, "--trainer.port", 18000, "--inference.port", 18000)
    assert code == 2
    assert "18000" in err


def test_secrets_and_settings_travel_apart(keptset, work):
    variables = {
        "KEPTSET_INFERENCE__API_KEY": "hush",
        "KEPTSET_ORCHESTRATOR__STEPS": "1",
        "KEPTSET_TRAINER__SEED": "5",
    }
    code, out, err = keptset("run", DEMO, "--orchestrator.steps", 2, **variables)
    assert code == 0, err
    run = work / "runs" / "reverse-text"
    text = {path: path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()}
    assert not [path for path, content in text.items() if "hush" in content]
    assert "hush" not in out
    assert "['KEPTSET_INFERENCE__API_KEY']" in text[run / "logs" / "inference.log"]
    # The command line has overruled the environment, and must not be overruled again in the service.
    assert "['KEPTSET_ORCHESTRATOR__INFERENCE_API_KEY']" in text[run / "logs" / "orchestrator.log"]
    assert tomllib.loads(text[run / "configs" / "trainer.toml"])["trainer"]["seed"] == 5


def test_services_share_the_cores_unless_told_otherwise(keptset, work, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    keptset("run", DEMO, "--orchestrator.steps", 1)
    keptset("run", DEMO, "--orchestrator.steps", 1, OMP_NUM_THREADS="3")
    logs = [(work / "runs" / name / "logs" / "trainer.log").read_text() for name in NAMES]
    assert ["threads: 4" in logs[0], "threads: 3" in logs[1]] == [True, True]


def test_a_dry_run_prints_and_leaves_no_trace(keptset, work):
    code, out, _ = keptset("run", DEMO, "--dry-run", "--orchestrator.steps", 7)
    assert code == 0
    assert tomllib.loads(out)["orchestrator"]["steps"] == 7
    assert list(work.iterdir()) == []


def test_comparing_runs_all_three_and_draws_them(keptset, work):
    command = ("compare", DEMO, "--output", "pictures/c.png", "--orchestrator.steps", 2)
    for _ in range(2):  # the second replaces the first
        code, out, err = keptset(*command)
        assert code == 0, err
    assert re.search(r"no-replay +0\.15", out)
    assert (work / "pictures" / "c.png").exists()
    assert json.loads((work / "pictures" / "c.json").read_text())["replay"]["steps"] == 2
    folder = work / "runs" / "compare"
    assert {path.name for path in folder.glob("*.jsonl")} == {f"{arm}.jsonl" for arm in ARMS}
    assert all(len(path.read_text().splitlines()) == 2 for path in folder.glob("*.jsonl"))
    configs = {
        arm: {
            name: tomllib.loads((folder / arm / "configs" / f"{name}.toml").read_text())[name]
            for name in ("orchestrator", "trainer")
        }
        for arm in ARMS
    }
    top_p = {arm: config["orchestrator"]["train"]["sampling"]["top_p"] for arm, config in configs.items()}
    assert top_p == {"no-truncation": 1.0, "replay": 0.97, "no-replay": 0.97}
    ignoring = {arm: config["trainer"]["unsafe_ignore_kept_tokens"] for arm, config in configs.items()}
    assert ignoring == {"no-truncation": False, "replay": False, "no-replay": True}
    assert len({config["trainer"]["model"] for config in configs.values()}) == 1


ARMS = ("no-truncation", "replay", "no-replay")


def test_comparing_needs_truncation(keptset):
    code, _, err = keptset(
        "compare", DEMO, "--orchestrator.train.sampling.top_p", 1.0, "--orchestrator.train.sampling.top_k", -1
    )
    assert code == 1
    assert "not every source truncates" in err


@pytest.mark.parametrize("arguments", [(), ("train", DEMO), ("run",), ("run", "nowhere.toml")])
def test_wrong_arguments_are_said_without_a_traceback(keptset, arguments):
    code, _, err = keptset(*arguments)
    assert code in (1, 2)
    assert err
    assert "Traceback" not in err


def test_help_and_version(keptset):
    code, out, _ = keptset("--help")
    assert code == 0
    assert "keptset run CONFIG.toml" in out
    assert re.fullmatch(r"keptset \d+\.\d+\.\d+\n", keptset("--version")[1])


def test_nobody_is_a_member_of_a_group_that_is_gone():
    with subprocess.Popen(["true"], start_new_session=True) as process:
        process.wait()
    assert groups.members(process.pid) == []
