"""Five steps of the real services: two temperatures, self-distillation, an evaluation."""

import json
from pathlib import Path

import pytest

from ..started import UNTIL_ENDED

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
sampling = { temperature = 0.6, top_p = 0.5 }

[trainer]
full_vocabulary_scores = true
"""

METRICS = """
step reward/mean reward/min reward/max mismatch_kl/mean mismatch_kl/max ratio/mean ratio/max_abs_log
on_policy/share on_policy/mismatch_kl_mean on_policy/ratio_max_abs_log
kept/coverage kept/size_mean kept/size_p50 kept/size_p99 kept/singleton_share kept/bound_share
kept/mass_mean entropy/full entropy/kept loss grad_norm lr rejected/sequences clipped/tokens
tokens/loss tokens/total
rollout/error_rate rollout/trainable_share rollout/tokens rollout/length_mean rollout/truncated_share
seconds/rollout seconds/train seconds/publish seconds/weights seconds/weights_pause seconds/step
weight_version
source/cool/reward/mean source/hot/reward/mean source/self/reward/mean
full/logprob_mean reference/kl_mean
"""

OWN = {
    "cool": {"temperature": 0.6, "top_p": 0.97},
    "hot": {"temperature": 1.3, "top_p": 0.9},
    "self": {"temperature": 1.0, "top_p": 0.97},
}
"""What each source sets, or takes from [orchestrator.train.sampling]."""


def check_recorded_sampling(rollouts: Path) -> None:
    """With every rollout there is what was asked of the server, defaults and the rest of the context
    included; the seeds differ.
    """
    seeds = []
    for file in rollouts.iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            sampling = line["sampling"]
            seeds.append((file.name, line["sample_id"].split("/")[0], sampling.pop("seed")))
            expected = {"top_k": 512, "min_p": 0.0, "max_tokens": 18, "truncates": True}
            if file.name.startswith("eval-"):
                letters = line["text"].removeprefix("<|user|>").partition("<|end|>")[0]
                rest = 128 - len(letters) - len(["<|user|>", "<|end|>", "<|assistant|>"])
                expected |= {"temperature": 0.6, "top_p": 0.5, "top_k": -1, "max_tokens": rest}
            else:
                expected |= OWN[line["source"]]
            assert sampling == expected, file.name
            assert line["generator"] == "policy"
            assert line["tokens"] <= sampling["max_tokens"]
    assert len(set(seeds)) == len(seeds)
    assert {name.partition("-")[0] for name, _, _ in seeds} == {"step", "eval"}


def test_ratios_are_1_through_the_whole_chain(started):
    (started.folder / "sources.toml").write_text(SOURCES)
    run = started.run("sources.toml", "--orchestrator.steps", 5)
    code = run.wait(timeout=800)
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
        assert row["on_policy/share"] == 1
        assert row["on_policy/ratio_max_abs_log"] == row["ratio/max_abs_log"]
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
    check_recorded_sampling(folder / "rollouts")
    assert {path.name for path in (folder / "weights").iterdir()} >= {"v000004", "v000005"}
    assert {path.name for path in (folder / "configs").iterdir()} == {
        "inference-0.toml",
        "trainer.toml",
        "orchestrator.toml",
    }
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "coverage exactly 1" in out
    assert "✗" not in out
    replay = started.start("keptset", "replay", folder, "--json", "found.json")
    assert replay.wait(timeout=UNTIL_ENDED) == 0, started.output("keptset", "err")
    found = json.loads((started.folder / "found.json").read_text())
    assert (found["step"], found["tokens"], found["above"]) == (5, rows[-1]["tokens/loss"], 0)
    # two programs over the same weights and rows: rounding as in the step itself, if not to the bit
    assert max(map(abs, found["quantiles"].values())) < 1e-4
    assert set(found["by_source"]) == {"cool", "hot", "self"}
    started.assert_nothing_is_left()
