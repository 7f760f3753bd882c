"""The command `keptset` over stand-ins for the services: what it starts, shows, leaves and ends."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib

import httpx
import pytest

from keptset import groups, health
from keptset.training import _is_made
from keptset_settings import WarmStartSettings

from .running import DEMO, left_running, start

SOURCE = """
[[orchestrator.train.source]]
name = "reverse-text"

[orchestrator.train.source.environment]
kind = "reverse-text"
"""


def test_help_of_a_command_lists_the_settings_and_without_a_file_it_asks_for_one(keptset):
    short, long = keptset("--help"), keptset("run", "--help")
    assert short[0] == long[0] == 0
    assert long[1].startswith(short[1])
    assert "--orchestrator.train.sampling.top-p" in long[1]
    assert "--orchestrator.train" not in short[1]
    for command in ("run", "check", "compare"):
        code, out, err = keptset(command, "--dry-run")
        assert (code, out) == (2, "")
        assert f"write keptset {command} CONFIG.toml" in err


@pytest.mark.parametrize(
    ("answered", "told"),
    [
        ('{"error":{"message":"the loop is loading its model"}}', "the loop is loading its model"),
        ('{"detail":"x"}', 'HTTP 503: {"detail":"x"}'),
        ("[1]", "HTTP 503: [1]"),
        ("still loading\n", "HTTP 503: still loading"),
    ],
)
def test_a_service_that_is_not_healthy_is_quoted(answered, told):
    assert health._reason(httpx.Response(503, text=answered)) == told


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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"inference.model": "/nowhere/model"}, '[inference] model = "/nowhere/model": is no directory here'),
        ({"inference.model": "./model"}, '[inference] model = "./model": is no directory here'),
        ({"inference.model": "runs/models/it"}, '[inference] model = "runs/models/it": is no directory here'),
        (
            {"inference.model": "owner/name", "trainer.model": "/nowhere"},
            '[trainer] model = "/nowhere": is no directory here',
        ),
        ({"inference.model": "owner/name"}, '[inference] model = "owner/name": has no tokenizer.json here'),
        (
            {"inference.model": "owner/name", "orchestrator.tokenizer": "bare"},
            '[orchestrator] tokenizer = "bare": has no tokenizer.json here',
        ),
    ],
)
def test_a_model_that_is_not_there_is_named_before_anything_starts(keptset, work, given, told):
    (work / "bare").mkdir()
    config = work / "own.toml"
    config.write_text(f"[orchestrator]\nsteps = 1\n\n{SOURCE}")
    code, out, err = keptset(
        "run", config, *(text for key, value in given.items() for text in (f"--{key}", value))
    )
    assert code == 1
    assert told in err
    assert "healthy" not in out
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpus.inference", "[2]"], "gpus.inference: 2: there is no such GPU, of 1 to be seen here (5)"),
        (["--weights.transfer", "nccl"], '"nccl": inference and trainer are both on GPU 5 of 1'),
    ],
)
def test_gpus_that_cannot_be_are_named_before_anything_is_made(keptset, work, options, told):
    code, out, err = keptset(
        *("run", DEMO, "--trainer.device", "auto", *options),
        CUDA_VISIBLE_DEVICES="5",
        NCCL_MULTI_RANK_GPU_ENABLE="0",
    )
    assert code == 1
    assert told in err
    assert "keptset resume" not in err
    assert "healthy" not in out
    assert not (work / "runs").exists()


def test_a_run_says_how_to_start_ranks_that_it_does_not_start(keptset, work):
    code, out, err = keptset("run", DEMO, "--orchestrator.steps", 1, "--trainer.ranks", "external")
    assert (code, err) == (0, "")
    settings = work / "runs" / "reverse-text" / "trainer" / "settings.json"
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node=1 -m keptset_trainer.loop"
    command = f"cd {work} && TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60 {torchrun} {settings}"
    assert f"waiting for them; in another shell: {command}" in out
    assert "end torchrun with Ctrl-C" in out


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
    keptset("run", DEMO, "--orchestrator.steps", 1)  # the model is there: its making is bounded likewise
    arguments = ("run", DEMO, "--orchestrator.startup_timeout", 8)
    code, _, err = keptset(*arguments, FAKE_TRAINER="sick")
    assert code == 1
    assert re.search(r"waited \d+ s for the health of trainer at http://\S+ \(HTTP 503: still loading\)", err)
    assert left_running(work) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing_running(work, number):
    with start("run", DEMO) as process:
        assert len(left_running(work)) >= 5
        process.send_signal(number)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    assert left_running(work) == []


def test_a_killed_run_leaves_nothing_running(work):
    with start("run", DEMO) as process:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 100
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


def test_arms_that_ran_apart_are_drawn_together(keptset, work):
    command = ("compare", DEMO, "--orchestrator.steps", 2)
    for arm in ("replay", "no-truncation"):
        code, _, err = keptset(*command, "--arms", arm, "--output", f"{arm}.png")
        assert code == 0, err
    code, out, err = keptset(*command, "--arms", "replay,no-truncation", "--drawn", "--output", "both.png")
    assert code == 0, err
    assert out.index("no-truncation ") < out.index("replay ")
    assert set(json.loads((work / "both.json").read_text())) == {"no-truncation", "replay"}
    assert (work / "both.png").exists()
    code, _, err = keptset(*command, "--drawn")
    assert code == 1
    assert "--drawn: no-replay has not run, there is no" in err
    code, _, err = keptset(*command, "--arms", "replayed")
    assert code == 1
    assert "--arms: 'replayed' is no arm; there are no-truncation, replay, no-replay" in err


ARMS = ("no-truncation", "replay", "no-replay")


def test_comparing_needs_truncation(keptset):
    code, _, err = keptset(
        "compare", DEMO, "--orchestrator.train.sampling.top_p", 1.0, "--orchestrator.train.sampling.top_k", -1
    )
    assert code == 1
    assert "not every source truncates" in err


@pytest.mark.parametrize("output", ["c.xyz", "file/c.png", "/proc/c.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(keptset, work, output):
    (work / "file").touch()
    code, out, err = keptset("compare", DEMO, "--output", output)
    assert code == 1
    assert f"--output {output}" in err
    assert "Traceback" not in err
    assert not out
    assert not (work / "runs").exists()


def test_runs_where_nothing_can_be_written_are_refused(keptset, work):
    code, _, err = keptset("run", DEMO, "--runs-dir", "/proc/runs")
    assert code == 1
    assert "runs_dir = /proc/runs" in err
    assert "--runs-dir" in err
    assert "Traceback" not in err


def test_a_disk_that_fails_midway_is_said_without_a_traceback(keptset, work, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "summary.json")

    monkeypatch.setattr("keptset.run.report", full)
    code, _, err = keptset("run", DEMO, "--orchestrator.steps", 1)
    assert code == 1
    assert err.endswith("keptset: summary.json: No space left on device\n")
    assert left_running(work) == []


@pytest.mark.parametrize("recipe", ["[1]", "{", '{"recipe": 3}', "{}", '{"recipe": {}}'])
def test_a_recipe_that_is_none_leaves_the_word_to_the_warm_start(work, recipe):
    (work / "recipe.json").write_text(recipe)
    assert not _is_made(work, WarmStartSettings())


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
