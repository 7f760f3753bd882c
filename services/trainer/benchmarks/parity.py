"""Does the number of ranks change a step, and does a resumed trainer make the same one? On GPUs, small model.

    python benchmarks/parity.py --folder F                                one rank; leaves its results in F
    torchrun --nproc-per-node 2 benchmarks/parity.py --folder F           two, compared with them

Writes F/parity.json; ends with 1 if anything is further off than its bound.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from qwen3_shape import TINY, Size, samples_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from keptset_settings import ClippedRatioLoss
from keptset_trainer import checkpoint
from keptset_trainer.attention import VARLEN
from keptset_trainer.losses import loss_function
from keptset_trainer.optimizer import adamw
from keptset_trainer.packing import pack
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks, join, leave
from keptset_trainer.train_step import train_step

SMALL = Size(
    hidden=256, layers=4, heads=4, key_heads=2, head_dim=64, intermediate=512, vocabulary=4096, tokens=1024
)
LENGTHS = [700, 512, 300, 256, 256, 200, 130, 129, 64, 33, 17, 5, 900]
FLOAT32_METRIC, FLOAT32_WEIGHTS = 1e-5, 1e-6
HALF_METRIC, HALF_WEIGHTS = 2e-2, 2e-3
"""Relative difference of metrics; of weights by norm."""


def shrink() -> None:
    """For a CPU."""
    global SMALL
    SMALL = TINY
    LENGTHS[:] = [max(2, length // 4) for length in LENGTHS]


class Trainer:
    """A model of one kind of precision on this rank."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, compiled: bool) -> None:
        self.ranks = ranks
        attention = "sdpa" if dtype == torch.float32 else VARLEN
        self.policy = SMALL.policy(ranks.device, dtype, attention)
        self.scorer, self.weights = prepare(self.policy, ranks, checkpointing="off", compiled=compiled)
        self.optimizer = adamw(self.weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.01)

    def step(self, number: int) -> dict[str, float]:
        samples = samples_of(LENGTHS, SMALL.vocabulary, number)
        metrics, grad_norm = train_step(
            self.scorer,
            self.weights,
            self.optimizer,
            self.ranks,
            samples,
            pack(samples, SMALL.tokens, self.ranks.rank, self.ranks.size),
            loss_function(ClippedRatioLoss()),
            max_grad_norm=1.0,
            entropy="full",
            ignore_masks=False,
            told_to_stop=lambda: False,
        )
        return metrics.result(grad_norm=grad_norm, lr=1e-3, seconds=0.0, ignored_masks=False)

    def whole(self) -> dict[str, Tensor]:
        return {name: self.weights.whole(name).float().cpu().clone() for name in self.weights.named}

    def save(self, path: Path) -> None:
        if self.ranks.is_first and path.exists():
            shutil.rmtree(path)
        record = {"step": 1}
        checkpoint.save(path, self.policy.model, self.weights, self.optimizer, self.ranks, path, record)

    def restore(self, path: Path) -> None:
        checkpoint.restore(path, self.weights, self.optimizer, self.ranks)


def metric_difference(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest relative one; what is next to 0 counts absolutely."""
    assert one.keys() == other.keys()
    return max(abs(one[name] - other[name]) / max(abs(other[name]), 0.1) for name in one)


def weight_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative, by norm over all."""
    square = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (square / sum(float(values.double().square().sum()) for values in other.values())) ** 0.5


def compare(
    ranks: Ranks, folder: Path, kind: str, dtype: torch.dtype, compiled: bool
) -> list[dict[str, Any]]:
    """Two steps and a resumed second one; one rank keeps them, more compare theirs with them."""
    torch.manual_seed(0)
    trainer = Trainer(ranks, dtype, compiled)
    first = trainer.step(1)
    saved = folder / f"{kind}-{ranks.size}"
    trainer.save(saved)
    second, after = trainer.step(2), trainer.whole()
    resumed = Trainer(ranks, dtype, compiled)
    resumed.restore(saved)
    again, after_again = resumed.step(2), resumed.whole()
    same = again == second and all(torch.equal(after[name], after_again[name]) for name in after)
    rows = [
        {"kind": kind, "ranks": ranks.size, "what": "resumed, the same bits", "reached": same, "good": same}
    ]
    if ranks.size == 1:
        save_file(after, folder / f"{kind}.safetensors")
        (folder / f"{kind}.json").write_text(json.dumps([first, second]))
        return rows
    kept_first, kept_second = json.loads((folder / f"{kind}.json").read_bytes())
    kept_after = load_file(folder / f"{kind}.safetensors")
    exact = dtype == torch.float32
    resharded = Trainer(ranks, dtype, compiled)
    resharded.restore(folder / f"{kind}-1")
    theirs, after_theirs = resharded.step(2), resharded.whole()
    for what, reached, bound in (
        (
            "first step's metrics",
            metric_difference(first, kept_first),
            FLOAT32_METRIC if exact else HALF_METRIC,
        ),
        (
            "second step's metrics",
            metric_difference(second, kept_second),
            10 * (FLOAT32_METRIC if exact else HALF_METRIC),
        ),
        ("weights", weight_difference(after, kept_after), FLOAT32_WEIGHTS if exact else HALF_WEIGHTS),
        (
            "metrics from one rank's checkpoint",
            metric_difference(theirs, kept_second),
            FLOAT32_METRIC if exact else HALF_METRIC,
        ),
        (
            "weights from one rank's checkpoint",
            weight_difference(after_theirs, kept_after),
            FLOAT32_WEIGHTS if exact else HALF_WEIGHTS,
        ),
    ):
        rows.append(
            {
                "kind": kind,
                "ranks": ranks.size,
                "what": what,
                "reached": reached,
                "must": bound,
                "good": reached <= bound,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--eager", action="store_true", help="do not compile the third kind")
    options = parser.parse_args()
    if options.tiny:
        shrink()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ranks = join(options.device)
    rows = []
    for kind, dtype, compiled in (
        ("float32", torch.float32, False),
        ("bfloat16", torch.bfloat16, False),
        ("bfloat16 compiled", torch.bfloat16, not options.eager),
    ):
        for row in compare(ranks, options.folder, kind.replace(" ", "-"), dtype, compiled):
            rows.append(row)
            if ranks.is_first:
                print(
                    f"{row['kind']:18} {row['ranks']} ranks  {row['what']:36} {row['reached']!s:24} "
                    f"{row.get('must', '')} {'' if row['good'] else '<- BAD'}",
                    flush=True,
                )
    if ranks.is_first:
        path = options.folder / "parity.json"
        before = json.loads(path.read_bytes()) if path.exists() and ranks.size > 1 else []
        path.write_text(json.dumps([*before, *rows], indent=1))
    leave()
    sys.exit(not all(row["good"] for row in rows))


if __name__ == "__main__":
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    main()
