"""One optimiser step over one batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from kept_loss import KeptLogprobs, kept_logprobs
from kept_tokens.messages import TrainingSample

from .full_scores import FullScores
from .losses import LossSum
from .losses.objective import row_loss
from .model import Policy
from .packing import MicroBatch, pack, pack_row
from .step_metrics import StepMetrics

Loss = Callable[..., LossSum]
Entropy = float | str | None


class NotFinite(ArithmeticError):
    """A step that would have made the weights NaN or infinite, and was not applied."""


class Abandoned(Exception):
    """The step was left because the trainer was told to stop; nothing was applied."""


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: list[TrainingSample],
    loss: Loss,
    *,
    row_tokens: int,
    max_grad_norm: float,
    entropy: Entropy,
    ignore_masks: bool,
    told_to_stop: Callable[[], bool],
    full_scores: FullScores | None = None,
) -> tuple[StepMetrics, float]:
    """Accumulate the gradient of all rows, clip it by its global norm, apply it.

    One forward pass serves both the loss and the mismatch, as there is one step a batch. The loss is divided
    by the loss tokens of the whole batch, so the rows of a batch could be packed in any other way.
    `full_scores`, if it is there, gets the logprobs over the whole vocabulary, and references are compared
    with them.

    Returns:
        The metrics and the norm of the gradient before clipping.

    Raises:
        NotFinite: names the sample; the weights are as before.
        Abandoned: `told_to_stop` said so; the weights are as before.
    """
    rows = pack(samples, row_tokens)
    loss_tokens = sum(row.labels.numel() for row in rows)
    metrics = StepMetrics()
    optimizer.zero_grad()
    for row in rows:
        if told_to_stop():
            raise Abandoned
        row = row.to(policy.head.device)
        scored = score(policy, row.without_masks() if ignore_masks else row, entropy, full_scores is not None)
        check_finite(row, scored, samples)
        summed = row_loss(loss, row, scored)
        if full_scores is not None:
            full_scores.add(row, scored)
        (summed.total / loss_tokens).backward()
        metrics.add(row, scored, summed, ignore_masks)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_grad_norm)
    if not (torch.isfinite(grad_norm) and torch.isfinite(torch.tensor(metrics.loss))):
        raise NotFinite(blame(policy, optimizer, samples, loss, ignore_masks, full_scores is not None))
    optimizer.step()
    optimizer.zero_grad()
    return metrics, float(grad_norm)


def score(policy: Policy, row: MicroBatch, entropy: Entropy, full_logprobs: bool) -> KeptLogprobs:
    """Logprobs of the row's N trained tokens; only their positions go through the head."""
    hidden = policy.hidden(row.token_ids, row.positions)[row.loss_mask]
    return kept_logprobs(
        hidden,
        policy.head,
        row.labels,
        row.kept,
        row.temperatures,
        softcap=policy.softcap,
        entropy=entropy,
        full_logprobs=full_logprobs,
    )


def check_finite(row: MicroBatch, scored: KeptLogprobs, samples: list[TrainingSample]) -> None:
    """Every logprob must be a number, and so must its ratio.

    Raises:
        NotFinite: names the first sample and position where one is not.
    """
    logprobs = scored.logprobs.detach().double()
    wrong = ~torch.isfinite(torch.exp(logprobs - row.rollout_logprobs.double()))
    wrong |= ~torch.isfinite(logprobs)
    if not wrong.any():
        return
    first = int(wrong.nonzero()[0])
    index, position = place_of(row, first)
    raise NotFinite(
        f"sample {index} (id {samples[index].sample_id!r}) at position {position}: token "
        f"{int(row.labels[first])} has logprob {float(logprobs[first])} here and "
        f"{float(row.rollout_logprobs[first])} in the rollout; "
        "the step was not applied. The weights before it are damaged or the rollout logprob is"
    )


def place_of(row: MicroBatch, n: int) -> tuple[int, int]:
    """(sample index in the batch, token position in the sample) of the row's n-th trained token."""
    sequence = int(row.sequence[n])
    token = int(row.loss_mask.nonzero()[n]) + 1
    return int(row.samples[sequence]), token - int(row.borders[sequence])


def blame(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: list[TrainingSample],
    loss: Loss,
    ignore_masks: bool,
    full_logprobs: bool,
) -> str:
    """Which sample alone has a gradient that is not finite. Slow; only after it has happened."""
    for index, sample in enumerate(samples):
        optimizer.zero_grad()
        row = pack_row([sample], [index]).to(policy.head.device)
        if row.labels.numel() == 0:
            continue
        scored = score(policy, row.without_masks() if ignore_masks else row, None, full_logprobs)
        row_loss(loss, row, scored).total.backward()
        for name, parameter in policy.model.named_parameters():
            if parameter.grad is not None and not is_finite(parameter.grad):
                optimizer.zero_grad()
                position = int(row.loss_mask.nonzero()[0]) + 1
                return (
                    f"sample {index} (id {sample.sample_id!r}), trained from position {position} on: its "
                    f"gradient of {name} is not finite; the step was not applied. Look at its advantages "
                    "and at the weights before this step"
                )
    optimizer.zero_grad()
    return (
        "the gradient of the batch is not finite, though that of each sample alone is: their sum overflows; "
        "the step was not applied. Look at the advantages"
    )


def is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
