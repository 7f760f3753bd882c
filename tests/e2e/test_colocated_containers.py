"""One GPU for engine and trainer as the compose files say it, without containers and without a GPU.

The services are processes of their own, each with the environment of its container, without `keptset run`.
"""

import json
import re
import socket
import subprocess
import sys

import pytest
import yaml

from keptset.ports import pick
from keptset_guards import GpuTurn

from ..started import DEMO, ROOT, UNTIL_ENDED, UNTIL_HEALTHY, Started

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SERVICES = ("inference", "trainer", "orchestrator")
STEPS = 2
FILES = ("docker-compose.yml", "deploy/compose.colocated.yml")


def environments(started: Started) -> dict[str, dict[str, str]]:
    """Service -> settings of its container, its volumes below one folder and its names this machine's."""
    taken: set[int] = set()
    for _ in SERVICES:
        taken.add(pick("127.0.0.1", taken))
    ports = dict(zip(SERVICES, sorted(taken), strict=True))
    project = [yaml.safe_load((ROOT / file).read_text())["services"] for file in FILES]
    found = {}
    for service in SERVICES:
        merged = {name: text for one in project for name, text in one[service]["environment"].items()}
        found[service] = {
            name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)
            .replace("/var/lib/keptset", str(started.folder))
            .replace("http://inference:8000", f"http://127.0.0.1:{ports['inference']}")
            .replace("http://trainer:8001", f"http://127.0.0.1:{ports['trainer']}")
            for name, text in merged.items()
            if name.startswith("KEPTSET_")
        }
        assert found[service].pop("KEPTSET_TRAINER__DEVICE", "cuda") == "cuda"  # there is none here
        found[service] |= {f"KEPTSET_{name.upper()}__PORT": str(port) for name, port in ports.items()}
        found[service] |= {
            "KEPTSET_WARM_START__DIRECTORY": str(started.model),
            "KEPTSET_ORCHESTRATOR__STEPS": str(STEPS),
            "KEPTSET_ORCHESTRATOR__STARTUP_TIMEOUT": str(UNTIL_HEALTHY),
            "KEPTSET_ORCHESTRATOR__TRAIN__PROMPTS_PER_STEP": "4",
            "KEPTSET_ORCHESTRATOR__TRAIN__GROUP_SIZE": "4",
        }
    return found


def test_engine_and_trainer_take_turns_by_the_lock_that_the_compose_files_name(started: Started):
    (started.folder / "secrets").mkdir()
    make = [sys.executable, "-I", ROOT / "deploy/docker/make_secrets.py", started.folder / "secrets"]
    subprocess.run([*make, "api-key", "internal-token"], check=True, timeout=60, stdout=subprocess.DEVNULL)
    environment = environments(started)
    running = {}

    def said(service: str) -> str:
        return started.output(service) + started.output(service, "err")

    # The test has the GPU first: who waits for it waits by the same lock.
    turn = GpuTurn(started.folder / "gpu" / "lock", "the test", shared=False)
    assert turn.try_to_take()
    for service in SERVICES:
        module, own = f"keptset_{service}", environment[service]
        running[service] = started.start(module, "--config", DEMO, name=service, environment=own)
    waits = f"waiting for the GPU, which {turn.name} has"
    for service in ("inference", "trainer"):
        started.wait_until(lambda name=service: waits in said(name), UNTIL_HEALTHY, f"{service} to wait")
    turn.give_back()

    assert running["orchestrator"].wait(timeout=2 * UNTIL_HEALTHY + UNTIL_ENDED) == 0, said("orchestrator")
    rows = (started.folder / "runs/run/metrics.jsonl").read_text().splitlines()
    turns = {"seconds/sleep", "seconds/wake", "seconds/offload", "seconds/reload"}
    assert [json.loads(row)["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(turns <= json.loads(row).keys() for row in rows)
    assert said("inference").count("asleep after ") == 1 + STEPS, "at the start, and once a step"
    assert said("inference").count(" awake after ") == 1 + STEPS
    assert socket.gethostname() in turn.path.read_text()
    for service in ("trainer", "inference"):
        running[service].terminate()
        assert running[service].wait(timeout=UNTIL_ENDED) == 0, said(service)
    started.assert_nothing_is_left()
