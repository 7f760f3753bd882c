"""Five steps of the real services: two temperatures, self-distillation, an evaluation."""

import json

import pytest

pytestmark = pytest.mark.e2e

SOURCES = """
[[orchestrator.train.source]]
name = "cool"
sampling = { temperature = 0.6 }

[[orchestrator.train.source]]
name = "hot"
sampling = { temperature = 1.3, top_p = 0.9 }

[[orchestrator.train.source]]
name = "self"
algorithm = { kind = "opsd" }

[[orchestrator.eval.source]]
name = "held-out"
interval = 5
examples = 3
group_size = 2
sampling = { temperature = 0.6, top_p = 0.5, max_tokens = 18 }

[trainer]
full_vocabulary_scores = true
"""

METRICS = """
step reward/mean reward/min reward/max mismatch_kl/mean mismatch_kl/max ratio/mean ratio/max_abs_log
kept/coverage kept/size_mean kept/size_p50 kept/size_p99 kept/singleton_share kept/mass_mean
entropy/full entropy/kept loss grad_norm lr rejected/sequences clipped/tokens tokens/loss tokens/total
rollout/error_rate rollout/trainable_share rollout/tokens rollout/length_mean rollout/truncated_share
seconds/rollout seconds/train seconds/weights seconds/step weight_version
source/cool/reward/mean source/hot/reward/mean source/self/reward/mean
full/logprob_mean reference/kl_mean
"""


def test_ratios_are_1_through_the_whole_chain(started):
    (started.folder / "sources.toml").write_text(SOURCES)
    run = started.run("sources.toml", "--orchestrator.steps", 5)
    code = run.wait(timeout=280)
    out, err = started.output("keptset"), started.output("keptset", "err")
    assert code == 0, err
    folder = started.folder / "runs" / "short"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert not [name for name in METRICS.split() if name not in row]
        # Rounding alone: step 1 is at the weights that the engine started with, the others at published ones.
        assert row["ratio/max_abs_log"] < 1e-4
        assert row["mismatch_kl/mean"] <= 1e-7
        assert row["kept/coverage"] == 1
        assert row["rollout/error_rate"] == 0
        assert row["rejected/sequences"] == 0
        assert row["tokens/loss"] == row["rollout/tokens"] > 0
        assert row["weight_version"] == row["step"]
        # The masks are no formality: a tail is cut off.
        assert 1 < row["kept/size_mean"] < 261
        assert row["kept/mass_mean"] < 0.999
        # what the policy says of its rollouts with the solution in sight is something else than without
        assert abs(row["reference/kl_mean"]) > 1e-3
    evaluated = [{name for name in row if name.startswith("eval/")} for row in rows]
    assert evaluated[:4] == [set()] * 4
    assert evaluated[4] >= {"eval/held-out/avg@2", "eval/held-out/pass@1", "eval/held-out/pass@2"}
    assert len({row["loss"] for row in rows}) == 5
    assert all(row["grad_norm"] > 0 for row in rows)
    assert {path.name for path in (folder / "weights").iterdir()} >= {"v000004", "v000005"}
    assert {path.name for path in (folder / "configs").iterdir()} == {
        "inference-0.toml",
        "trainer.toml",
        "orchestrator.toml",
    }
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "coverage exactly 1" in out
    assert "✗" not in out
    started.assert_nothing_is_left()
