"""Services that die and are started again, and runs that go on after their end, over stand-ins."""

import json
import os
import shutil
import signal
import subprocess
import tomllib

import pytest

from keptset import resolve
from keptset.directory import reopen

from .running import DEMO, left_running, start


def rows(run) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def interrupted(*arguments):
    """A run that was stopped after its first step."""
    with start("run", DEMO, *arguments) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    return err


def test_a_service_that_died_is_started_again(keptset, work):
    once = work / "once"
    code, out, err = keptset("run", DEMO, "--restarts", 1, FAKE_ORCHESTRATOR=f"once {once}")
    assert code == 0, err
    assert "orchestrator  died (exit code 1); started again (1 of 1 until the next step)" in out
    run = work / "runs" / "reverse-text"
    assert rows(run) == list(range(1, 31))
    (entry,) = map(json.loads, (run / "restarts.jsonl").read_text().splitlines())
    assert (entry["service"], entry["ended"]) == ("orchestrator", "exit code 1")
    assert json.loads((run / "summary.json").read_text())["restarts/orchestrator"] == 1
    assert "started again" in out
    assert left_running(work) == []


@pytest.mark.parametrize("name", ["inference", "trainer"])
def test_a_peer_that_was_killed_is_started_again_in_its_place(name, work):
    with start("run", DEMO, "--restarts", 1, "--name", "x") as process:
        (pid,) = [
            int(line.split()[0])
            for line in subprocess.run(
                ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
            ).stdout.splitlines()
            if f"-m keptset_{name} " in line and f"{work}/runs/x/" in line
        ]
        os.kill(pid, signal.SIGKILL)
        assert process.stdout is not None
        assert any(
            f"{name} " in line and "died (killed by SIGKILL); started again" in line
            for line in process.stdout
        )
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)
    assert left_running(work) == []


def test_a_service_that_dies_over_and_over_stops_the_run(keptset, work):
    code, out, err = keptset("run", DEMO, "--restarts", 2, FAKE_INFERENCE="exit")
    assert code == 1
    assert out.count("inference     died (exit code 1); started again") == 2
    assert "inference died (exit code 1); the end of " in err
    assert "it was started again 2 times in vain" in err
    assert left_running(work) == []


def test_without_restarts_the_way_on_is_said(keptset, work):
    code, out, err = keptset("run", DEMO, FAKE_ORCHESTRATOR="late")
    assert code == 1
    assert "`keptset resume runs/reverse-text` goes on with it" in err
    assert "started again" not in out


def test_a_stopped_run_goes_on_exactly(keptset, work, monkeypatch):
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY", "hush")
    err = interrupted("--orchestrator.train.group_size", 3)
    assert "`keptset resume runs/reverse-text` goes on with it" in err
    run = work / "runs" / "reverse-text"
    assert rows(run) == [1]
    before = {path.name: path.read_text() for path in (run / "configs").iterdir()}
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__STEPS", "99")  # no longer counts
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__TRAIN__GROUP_SIZE", "7")
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    code, out, err = keptset("resume", "../runs/reverse-text")
    assert code == 0, err
    assert "1 of 30 are done already" in out
    assert rows(run) == list(range(1, 31))
    for name, text in before.items():
        old, new = tomllib.loads(text), tomllib.loads((run / "configs" / name).read_text())
        for table in (*old.values(), *new.values()):
            for moving in ("port", "inference_urls", "trainer_url"):
                table.pop(moving, None)
        assert old == new
    assert "hush" not in (run / "run.toml").read_text() + (run / "origin.json").read_text()
    assert left_running(work) == []


def test_a_killed_run_goes_on_once_its_services_have_ended(keptset, work):
    with start("run", DEMO) as process:
        process.kill()
        process.communicate()
    code, _, err = keptset("resume", "runs/reverse-text/")
    assert code == 0, err
    assert rows(work / "runs" / "reverse-text") == list(range(1, 31))


def test_a_secret_that_is_missing_is_named(keptset, work, monkeypatch):
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY", "hush")
    interrupted()
    monkeypatch.delenv("KEPTSET_INFERENCE__API_KEY")
    code, _, err = keptset("resume", "runs/reverse-text")
    assert code == 1
    assert "was started with KEPTSET_INFERENCE__API_KEY, " in err
    assert "set them again" in err


def test_what_cannot_go_on_is_refused_with_the_reason(keptset, work):
    def refused(*arguments) -> str:
        code, _, err = keptset("resume", *arguments)
        assert code == 1
        assert "Traceback" not in err
        return err

    assert "resume takes the run's directory" in refused()
    assert "resume takes the run's directory" in refused("runs/x", "--orchestrator.seed", 5)
    for text in ("many", "", "-1", "2.5"):
        assert f"--orchestrator.steps: {text!r} is no whole number" in refused(
            "runs/x", f"--orchestrator.steps={text}"
        )
    assert "runs/x is not there" in refused("runs/x")
    (work / "runs" / "mine").mkdir(parents=True)
    assert "runs/mine is not the directory of a run" in refused("runs/mine")
    keptset("run", DEMO, "--orchestrator.steps", 2)
    run = work / "runs" / "reverse-text"
    assert "2 of 2 steps are done; --orchestrator.steps gives it more" in refused("runs/reverse-text")
    assert "--orchestrator.steps 1: the run has 2; it can" in refused(
        "runs/reverse-text", "--orchestrator.steps", 1
    )
    moved = shutil.move(run, work / "runs" / "moved")
    (moved / "summary.json").unlink()
    assert "was runs/reverse-text when it started" in refused("runs/moved")
    (moved / "run.toml").write_text("nonsense = 1\n")
    assert "run.toml was changed, and cannot be used" in refused("runs/moved")
    (moved / "origin.json").unlink()
    assert "was made by an earlier version of keptset" in refused("runs/moved")
    # the lock is free again after each refusal
    reopen(moved, 0).__exit__()


def test_a_run_that_is_to_have_more_steps_goes_on_and_remembers_them(keptset, work):
    falling = ("--trainer.optimizer.schedule", "linear", "--trainer.optimizer.warmup_steps", 1)
    keptset("run", DEMO, "--orchestrator.steps", 2, *falling)
    run = work / "runs" / "reverse-text"
    code, out, err = keptset("resume", run, "--orchestrator.steps", 4)
    assert code == 0
    assert "the learning rate falls until step 4, no longer 2" in err
    assert "2 of 4 are done already" in out
    assert rows(run) == [1, 2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    saved = tomllib.loads((run / "run.toml").read_text())
    assert saved["orchestrator"]["steps"] == saved["trainer"]["optimizer"]["decay_steps"] == 4
    assert "port" not in saved["inference"] or saved["inference"]["port"] == 0
    code, _, err = keptset("resume", run)
    assert code == 1
    assert "4 of 4 steps are done" in err


def test_a_run_whose_gpus_are_not_there_is_refused_and_stays_as_it_was(keptset, work):
    options = ("--trainer.device", "auto", "--gpus.trainer", "[1]", "--trainer.optimizer.schedule", "linear")
    code, _, err = keptset("run", DEMO, "--orchestrator.steps", 2, *options, CUDA_VISIBLE_DEVICES="4,7")
    assert code == 0, err
    run = work / "runs" / "reverse-text"
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    more = ("resume", run, "--orchestrator.steps", 4)
    code, _, err = keptset(*more, CUDA_VISIBLE_DEVICES="4")
    assert code == 1
    assert "gpus.trainer: 1: there is no such GPU, of 1 to be seen here (4)" in err
    assert "falls until" not in err
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    code, _, err = keptset(*more, CUDA_VISIBLE_DEVICES="4,7")
    assert code == 0, err
    assert rows(run) == [1, 2, 3, 4]


def test_a_run_in_progress_is_refused(keptset, work, monkeypatch):
    with start("run", DEMO) as process:
        monkeypatch.setattr(resolve, "LOCK_PATIENCE", 1e6)  # which is for a keptset that is gone
        code, _, err = keptset("resume", "runs/reverse-text")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)
    assert code == 1
    assert "a run is using runs/reverse-text right now" in err


def test_a_run_that_ended_before_its_report_gets_it(keptset, work):
    keptset("run", DEMO, "--orchestrator.steps", 2)
    run = work / "runs" / "reverse-text"
    (run / "summary.json").unlink()
    code, _, err = keptset("resume", run)
    assert code == 0, err
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
