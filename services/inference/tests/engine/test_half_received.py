"""Weights of which only a part has come, in a real worker, are never sampled with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..models.tiny import save_model, tiny_model

pytestmark = pytest.mark.engine


def test_wherever_a_transfer_ends_the_weights_of_before_come_back_whole(tmp_path):
    models = [str(save_model(tiny_model(seed), tmp_path / f"{seed}")) for seed in (0, 1)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("half_received.py")), *models],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("told ")]
    first, *cuts, whole, new, vllm = told
    assert len(cuts) == 24
    for cut in cuts:
        assert "CalledOff: gave up after" in cut["said"], cut
        assert ("it was called off" if cut["cut"] == 1 else "that was all of 0.1 s") in cut["said"]
        assert (cut["back"], cut["now"]) == (None, first["base"]), f"after {cut['cut']} tensors"
    assert whole == {"whole": None, "now": new["new"]}
    assert new["new"] != first["base"]
    # What is patched: once this is 0, a load after one that failed is whole, and `keptset_reload` can go.
    assert vllm["vllm_fails"] > 0
    assert vllm["now"] == new["new"]
