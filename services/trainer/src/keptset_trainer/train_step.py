"""One optimiser step over one batch, on one rank or on many."""

from collections.abc import Callable, Sequence

import torch

from kept_loss import KeptLogprobs
from kept_tokens.messages import TrainingSample

from .full_scores import FullScores
from .losses import LossSum
from .losses.objective import row_loss
from .master_weights import MasterWeights
from .micro_batch import MicroBatch
from .optimizer import clip_and_step
from .packing import BegunRow, Rows, pack_row
from .ranks import Ranks
from .scorer import Entropy, Scorer
from .step_metrics import StepMetrics

Loss = Callable[..., LossSum]


class NotFinite(ArithmeticError):
    """A step that would have made the weights NaN or infinite, and was not applied."""


class Abandoned(Exception):
    """The step was left because the trainer was told to stop; nothing was applied."""


def train_step(
    scorer: Scorer,
    weights: MasterWeights,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    samples: Sequence[TrainingSample],
    rows: Rows,
    loss: Loss,
    *,
    max_grad_norm: float,
    entropy: Entropy,
    ignore_masks: bool,
    told_to_stop: Callable[[], bool],
    full_scores: FullScores | None = None,
    version: int | None = None,
) -> tuple[StepMetrics, float]:
    """Accumulate the gradient of all rows, clip it by its global norm, apply it.

    One forward pass serves both the loss and the mismatch, as there is one step a batch. The loss is divided
    by the loss tokens of the whole batch, so the rows of a batch could be packed in any other way and lie on
    any other ranks. On a GPU the host waits for the device once, at the end,
    and in each row of which only a part goes over the whole vocabulary (some of the entropy; tokens with and
    without sets in one row): which positions those are, the device is asked.

    Args:
        scorer: the policy.
        weights: its float32 weights on this rank.
        optimizer: of these.
        ranks: every one calls this with the same arguments, but for its rows.
        samples: of the whole batch; only looked at to find who is to blame.
        rows: this rank's share of them.
        loss: the objective.
        max_grad_norm: to which the gradient is clipped.
        entropy: how much of the entropy diagnostic.
        ignore_masks: score every token over the whole vocabulary.
        told_to_stop: asked of the first rank between rows.
        full_scores: gets the logprobs over the whole vocabulary, and references are compared with them.
        version: of the weights, as samples name it; None: the metrics tell no on-policy tokens from others.

    Returns:
        The metrics of the whole batch and the norm of the gradient before clipping.

    Raises:
        NotFinite: names the sample; the weights are as before.
        Abandoned: `told_to_stop` said so; the weights are as before.
    """
    metrics = StepMetrics(version)
    weights.drop_gradients()
    loss_tokens = None
    for number in range(len(rows)):
        if ranks.from_first(told_to_stop()):
            weights.drop_gradients()
            raise Abandoned
        scorer.is_last_row = number == len(rows) - 1
        row, on_device, scored = score(
            scorer, rows.begun(number), ranks.device, entropy, ignore_masks, full_scores is not None
        )
        summed = row_loss(loss, on_device, scored)
        if loss_tokens is None:  # while the device is at the first row
            loss_tokens = sum(ranks.gathered(rows.loss_tokens()))
        # averages: each rank has a part of the sum, of which some masters take the mean
        (summed.total * (weights.averages / loss_tokens)).backward()
        weights.add_up(only=len(rows) == 1)
        if not row.is_empty:
            metrics.add(row, on_device, scored, summed, ignore_masks)
            if full_scores is not None:
                full_scores.add(row, scored)
        del scored, summed  # what autograd has of this row must not be there while the next one is recorded
    weights.collect()
    faults = metrics.not_finite(ranks.device)
    grad_norm, sound, rounded = clip_and_step(optimizer, ranks, max_grad_norm, faults)
    weights.give_back(rounded)
    weights.drop_gradients()
    metrics.read()
    applied, norm = torch.stack([sound.float(), grad_norm]).tolist()
    if not applied:
        raise NotFinite(blame(scorer, weights, ranks, samples, loss, ignore_masks, full_scores is not None))
    everybody, *others = ranks.gathered(metrics)
    for other in others:
        everybody = everybody.merge(other)
    return everybody, norm


def score(
    scorer: Scorer,
    begun: BegunRow,
    device: torch.device,
    entropy: Entropy,
    ignore_masks: bool,
    full_logprobs: bool,
) -> tuple[MicroBatch, MicroBatch, KeptLogprobs]:
    """A row on the host, the same on the device, and its logprobs.

    The body's work is given to the device first: it is at the body while the host packs the labels.
    """
    sequences = scorer.arranged(begun.sequences).to(device)
    rows: list[MicroBatch] = []

    def labelled() -> MicroBatch:
        row = begun.labelled()
        on_device = row.to(device, there=sequences)
        rows.extend((row, on_device))
        return on_device.without_masks() if ignore_masks else on_device

    scored: KeptLogprobs = scorer(sequences, labelled, entropy, full_logprobs)
    row, on_device = rows
    return row, on_device, scored


def blame(
    scorer: Scorer,
    weights: MasterWeights,
    ranks: Ranks,
    samples: Sequence[TrainingSample],
    loss: Loss,
    ignore_masks: bool,
    full_logprobs: bool,
) -> str:
    """Which sample alone has a logprob or a gradient that is not finite. Slow; only after it has happened.

    Every rank looks at every sample, together: their gradients are one.
    """
    fault = None
    scorer.graphs = None  # rows of their own shapes, seen once
    for index, sample in enumerate(samples):
        weights.drop_gradients()
        row = pack_row([sample], [index]).to(ranks.device)
        if row.labels.numel() == 0:
            continue
        scored = scorer.of_row(row.without_masks() if ignore_masks else row, None, full_logprobs)
        summed = row_loss(loss, row, scored)
        summed.total.backward()
        weights.add_up()
        weights.collect()
        fault = logprob_fault(row, scored, sample) or gradient_fault(row, weights, ranks, sample)
        if fault is not None:
            break
    weights.drop_gradients()
    return fault or (
        "the gradient of the batch is not finite, though that of each sample alone is: their sum overflows; "
        "the step was not applied. Look at the advantages"
    )


def logprob_fault(row: MicroBatch, scored: KeptLogprobs, sample: TrainingSample) -> str | None:
    """The first token of a row of one sample whose logprob, or its ratio, is not a number."""
    logprobs = scored.logprobs.detach().double()
    wrong = ~torch.isfinite(torch.exp(logprobs - row.rollout_logprobs.double()))
    wrong |= ~torch.isfinite(logprobs)
    if not wrong.any():
        return None
    first = int(wrong.nonzero()[0])
    position = int(row.predicting[first]) + 1
    return (
        f"sample {int(row.samples[0])} (id {sample.sample_id!r}) at position {position}: "
        f"token {int(row.labels[first])} has logprob {float(logprobs[first])} here and "
        f"{float(row.rollout_logprobs[first])} in the rollout; "
        "the step was not applied. The weights before it are damaged or the rollout logprob is"
    )


def gradient_fault(
    row: MicroBatch, weights: MasterWeights, ranks: Ranks, sample: TrainingSample
) -> str | None:
    """The first parameter whose gradient by a row of one sample is not finite."""
    for name, parameter in weights.named.items():
        wrong = parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        if any(ranks.gathered(wrong)):
            return (
                f"sample {int(row.samples[0])} (id {sample.sample_id!r}), trained from position "
                f"{int(row.predicting[0]) + 1} on: its gradient of {name} is not finite; the step was not "
                "applied. Look at its advantages and at the weights before this step"
            )
    return None
