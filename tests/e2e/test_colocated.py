"""One GPU for engine and trainer, played on a CPU: turns and all, it comes to the very same run.

There the engine merely pauses and the trainer's states stay; what those two do to the bits is in the tests of
both services.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ..started import UNTIL_ENDED, UNTIL_HEALTHY

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1500)]  # two runs

ALONE = ("--inference.vllm.max_num_seqs", 1, "--orchestrator.train.prompts_per_step", 3)
"""One sequence at a time: what is computed together with others rounds otherwise."""


def came_to(folder: Path) -> dict[str, Any]:
    """Of a run: rows without times, hashes of batches and of published weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    manifests = sorted((folder / "weights").glob("v*/manifest.json"))
    return {
        "rows": [{name: row[name] for name in row if not name.startswith("seconds/")} for row in rows],
        "batches": sorted(path.name for path in (folder / "rollouts").iterdir()),
        "weights": [json.loads(path.read_bytes()) for path in manifests],
    }


def test_a_colocated_run_is_the_same_run_bit_for_bit(started):
    found = {}
    for name, colocated in (("apart", "false"), ("together", "true")):
        run = started.run("--orchestrator.steps", 3, *ALONE, "--colocated", colocated, "--restarts", 1)
        assert run.wait(timeout=UNTIL_HEALTHY + UNTIL_ENDED) == 0, started.output("keptset", "err")
        (started.folder / "runs" / "short").rename(started.folder / "runs" / name)
        found[name] = came_to(started.folder / "runs" / name)
    assert found["together"] == found["apart"]
    assert [row["step"] for row in found["together"]["rows"]] == [1, 2, 3]
    assert len({row["loss"] for row in found["together"]["rows"]}) == 3
    assert [one["version"] for one in found["together"]["weights"]] == [1, 2, 3]
    folder = started.folder / "runs" / "together"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    turns = {"seconds/sleep", "seconds/wake", "seconds/offload", "seconds/reload"}
    assert all(turns <= row.keys() for row in rows)
    said = (folder / "logs" / "inference.log").read_text()
    assert said.count("asleep after ") == 4, "at the start, and once a step"
    assert said.count(" awake after ") == 4
    assert "the engine merely pauses" in said
    assert not (folder / "restarts.jsonl").exists()
    started.assert_nothing_is_left()
