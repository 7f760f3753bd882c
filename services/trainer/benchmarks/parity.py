"""Does the number of ranks change a step, and does a resumed trainer make the same one? On GPUs, small model.

With deterministic kernels: without, rows that are recorded run other attention kernels than a layout's first.

    python benchmarks/parity.py --folder F                                one rank; leaves its results in F
    torchrun --nproc-per-node 2 benchmarks/parity.py --folder F           two, compared with them

Writes F/parity.json; ends with 1 if anything is further off than its bound.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from qwen3_shape import TINY, Size, samples_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from keptset_settings import ClippedRatioLoss
from keptset_trainer import checkpoint
from keptset_trainer.attention import VARLEN
from keptset_trainer.layout import Layout, filled
from keptset_trainer.losses import loss_function
from keptset_trainer.optimizer import adamw
from keptset_trainer.packing import pack
from keptset_trainer.prepare import Checkpointing, prepare
from keptset_trainer.ranks import Ranks, join, leave
from keptset_trainer.train_step import train_step

SMALL = Size(
    hidden=256, layers=4, heads=4, key_heads=2, head_dim=64, intermediate=512, vocabulary=4096, tokens=1024
)
LENGTHS = [700, 512, 300, 256, 256, 200, 130, 129, 64, 33, 17, 5, 900]
ONE_ROW = [500, 300, 100]
"""One layout, so that what is compiled is the same code with graphs and without."""
FLOAT32_METRIC, FLOAT32_WEIGHTS = 1e-5, 1e-6
HALF_METRIC, HALF_WEIGHTS = 2e-2, 2e-3
"""Relative difference of metrics; of weights by norm."""


def shrink() -> None:
    """For a CPU."""
    global SMALL
    SMALL = TINY
    for lengths in (LENGTHS, ONE_ROW):
        lengths[:] = [max(2, length // 4) for length in lengths]


@dataclass(frozen=True)
class Kind:
    """How a model is prepared."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    sharding: Literal["full", "optimizer"] = "full"
    """Of more than one rank."""
    compiled: bool = False
    checkpointing: Checkpointing = "off"
    graphs: bool = False
    by_hand: bool = False
    """The same rows, kernel by kernel."""

    @property
    def file(self) -> str:
        return self.name.replace(" ", "-").replace(",", "")


KINDS = [
    Kind("float32", torch.float32),
    Kind("float32, optimizer sharded", torch.float32, sharding="optimizer"),
    Kind("bfloat16"),
    Kind("bfloat16 compiled", compiled=True),
    Kind("graphs", sharding="optimizer", compiled=True, graphs=True),
    Kind("graphs, full checkpointing", sharding="optimizer", checkpointing="full", graphs=True),
    Kind("graphs, selective checkpointing", sharding="optimizer", checkpointing="selective", graphs=True),
]


class Trainer:
    """A model of one kind on this rank."""

    def __init__(self, ranks: Ranks, kind: Kind) -> None:
        self.ranks, self.kind = ranks, kind
        attention = "sdpa" if kind.dtype == torch.float32 else VARLEN
        self.policy = SMALL.policy(ranks.device, kind.dtype, attention)
        self.scorer, self.weights = prepare(
            self.policy,
            ranks,
            checkpointing=kind.checkpointing,
            compiled=kind.compiled,
            sharding=kind.sharding if ranks.size > 1 else "none",
            graphs="on" if kind.graphs and not kind.by_hand and ranks.device.type == "cuda" else "off",
        )
        if kind.by_hand:
            self.scorer.arranged = lambda row: filled(row, Layout.around(row))  # type: ignore[method-assign]
        self.optimizer = adamw(self.weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.01)

    def step(self, number: int) -> dict[str, float]:
        samples = samples_of(ONE_ROW if self.kind.graphs else LENGTHS, SMALL.vocabulary, number)
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


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def weight_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative, by norm over all."""
    square = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (square / sum(float(values.double().square().sum()) for values in other.values())) ** 0.5


def compare(ranks: Ranks, folder: Path, kind: Kind) -> list[dict[str, Any]]:
    """Two steps and a resumed second one; one rank keeps them, more compare theirs with them."""
    torch.manual_seed(0)
    trainer = Trainer(ranks, kind)
    first = trainer.step(1)
    saved = folder / f"{kind.file}-{ranks.size}"
    trainer.save(saved)
    second, after = trainer.step(2), trainer.whole()
    resumed = Trainer(ranks, kind)
    resumed.restore(saved)  # with graphs its next rows are not recorded yet, and those of `trainer` are
    again, after_again = resumed.step(2), resumed.whole()
    same = again == second and same_bits(after, after_again)
    rows = [row_of(kind, ranks, "resumed, the same bits", same)]
    if ranks.size == 1:
        if kind.graphs:
            rows.append(
                row_of(kind, ranks, "as without graphs, the same bits", as_without_graphs(ranks, kind))
            )
        save_file(after, folder / f"{kind.file}.safetensors")
        (folder / f"{kind.file}.json").write_text(json.dumps([first, second]))
        return rows
    kept_first, kept_second = json.loads((folder / f"{kind.file}.json").read_bytes())
    kept_after = load_file(folder / f"{kind.file}.safetensors")
    exact = kind.dtype == torch.float32
    resharded = Trainer(ranks, kind)
    resharded.restore(folder / f"{kind.file}-1")
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
        rows.append(row_of(kind, ranks, what, reached <= bound, reached, bound))
    return rows


def row_of(
    kind: Kind, ranks: Ranks, what: str, good: bool, reached: float | None = None, must: float | None = None
) -> dict[str, Any]:
    reached = good if reached is None else reached
    return {
        "kind": kind.name,
        "ranks": ranks.size,
        "what": what,
        "reached": reached,
        "must": must,
        "good": good,
    }


def as_without_graphs(ranks: Ranks, kind: Kind) -> bool:
    """Four steps, of which the last two are replayed, against the same rows kernel by kernel."""
    with_graphs, without = Trainer(ranks, kind), Trainer(ranks, replace(kind, by_hand=True))
    steps = [[trainer.step(number) for number in range(4)] for trainer in (with_graphs, without)]
    graphs = with_graphs.scorer.graphs
    recorded = graphs is None or bool(graphs.recorded)  # None on a CPU
    return recorded and steps[0] == steps[1] and same_bits(with_graphs.whole(), without.whole())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kinds", nargs="*", help="only these, by name")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args()
    if options.tiny:
        shrink()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ranks = join(options.device)
    rows = []
    for kind in [kind for kind in KINDS if not options.kinds or kind.name in options.kinds]:
        torch._dynamo.reset()
        for row in compare(
            ranks, options.folder, replace(kind, compiled=kind.compiled and not options.eager)
        ):
            rows.append(row)
            if ranks.is_first:
                print(
                    f"{row['kind']:32} {row['ranks']} ranks  {row['what']:36} {row['reached']!s:24} "
                    f"{row['must'] or ''} {'' if row['good'] else '<- BAD'}",
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
