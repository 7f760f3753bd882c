"""One step of the trainer, as most tests want it."""

from collections.abc import Sequence
from typing import Any

import torch

from kept_tokens.messages import TrainingSample
from keptset_settings import ClippedRatioLoss
from keptset_trainer.losses import loss_function
from keptset_trainer.master_weights import MasterWeights
from keptset_trainer.packing import pack
from keptset_trainer.ranks import Ranks
from keptset_trainer.scorer import Scorer
from keptset_trainer.train_step import train_step


def one_step(
    scorer: Scorer,
    weights: MasterWeights,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    samples: Sequence[TrainingSample],
    loss: Any = None,
    row_tokens: int = 64,
    **changes: Any,
) -> dict[str, float]:
    """Its metrics. `changes` are of `train_step`'s options."""
    options = {
        "max_grad_norm": 1.0, "entropy": "full", "ignore_masks": False, "told_to_stop": lambda: False,
    } | changes  # fmt: skip
    rows = pack(samples, row_tokens, ranks.rank, ranks.size)
    metrics, grad_norm = train_step(
        scorer, weights, optimizer, ranks, samples, rows, loss_function(loss or ClippedRatioLoss()), **options
    )
    lr = optimizer.param_groups[0]["lr"]
    return metrics.result(
        grad_norm=grad_norm, lr=lr, seconds=0.0, ignored_masks=bool(options["ignore_masks"])
    )
