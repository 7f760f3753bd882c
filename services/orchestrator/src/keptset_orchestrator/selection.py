"""Which rollouts of a step go to the trainer, and what the step's row says of all of them."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kept_tokens.messages import CROSS_ENTROPY, TrainingSample
from kept_tokens.statistics import KeptStatistics

from .batches import Built
from .filters import without_effect

log = logging.getLogger(__name__)

MIN_REWARD = "min_reward"


@dataclass(frozen=True)
class Selection:
    """What filters made of the rollouts of a step.

    Attributes:
        samples: For the trainer; never empty.
        flags: For each rollout, the names of the filters that flagged it.
        dropped: For each rollout, whether it is left out.
    """

    samples: list[TrainingSample]
    flags: list[list[str]]
    dropped: list[bool]


def select(built: Sequence[Built]) -> Selection:
    """Apply each source's filters.

    A step needs a batch. If the filters leave nothing to train on, all rollouts go to the trainer with
    advantages of 0: the gradient is 0, and what moves the weights is AdamW's memory of earlier ones and its
    weight decay.
    """
    flags: list[list[str]] = []
    dropped: list[bool] = []
    for one in built:
        source = one.prompt.source
        found = [f for f in source.filters if f.flags(one.completion, one.sample)]
        names, drop = [f.name for f in found], any(f.enforce for f in found)
        least = source.algorithm.min_reward
        if least is not None and one.reward < least:
            names, drop = [*names, MIN_REWARD], True
        flags.append(names)
        dropped.append(drop)
    samples = [one.sample for one, gone in zip(built, dropped, strict=True) if not gone]
    if not any(1 in sample.loss_mask for sample in samples):
        if any(dropped):
            log.warning(
                "the filters leave nothing of this step's %d rollouts to train on; they go to the trainer "
                "without "
                "effect",
                len(built),
            )
        samples = [
            without_effect(one.sample) if gone else one.sample
            for one, gone in zip(built, dropped, strict=True)
        ]
    return Selection(samples, flags, dropped)


def rollout_metrics(built: Sequence[Built], selection: Selection, sources: int) -> dict[str, float]:
    """What a step's row says of its rollouts.

    Rewards are the policy's (a frozen generator's, if there are no others); with several sources there is
    also the mean of each that has a prompt in this step. `rollout/trainable_share` is the share of the
    policy's samples, among those with tokens to train on, that have an advantage or a reference to compare
    with. `filter/<name>/share` is the share of all rollouts that a filter flagged, `rollout/dropped_share`
    those that are left out, `rollout/cut_share` those that were too long. `kept/bound_share` is said here, as
    the trainer knows no top_k: the share of the trained tokens with a kept set whose set has as many ids as
    their source's top_k allows.

    Args:
        built: Of the step.
        selection: What became of them.
        sources: How many the run has.
    """
    policy = [one for one in built if one.prompt.source.frozen is None] or list(built)
    rewards = np.array([one.reward for one in policy])
    lengths = np.array([int(one.completion.is_sampled.sum()) for one in built])
    cut_off = np.array([one.completion.finish_reason == "length" for one in built])
    trained = [one.sample for one in policy if 1 in one.sample.loss_mask]
    moving = sum(bool(s.arrays().advantages.any() or s.reference_weight) for s in trained)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "rollout/trainable_share": moving / len(trained) if trained else 0.0,
        "rollout/tokens": float(lengths.sum()),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/truncated_share": float(cut_off.mean()),
    }
    share = kept_at_bound(built, selection).bound_share
    if not math.isnan(share):
        metrics["kept/bound_share"] = share
    if any(one.prompt.source.frozen is not None for one in built):
        metrics["rollout/cut_share"] = float(np.mean([one.cut > 0 for one in built]))
    filters = {f.name for one in built for f in one.prompt.source.filters}
    filters |= {name for names in selection.flags for name in names}
    for name in sorted(filters):
        metrics[f"filter/{name}/share"] = float(np.mean([name in names for names in selection.flags]))
    if filters:
        metrics["rollout/dropped_share"] = float(np.mean(selection.dropped))
    if sources > 1:
        for name in dict.fromkeys(one.prompt.source.name for one in built):
            of_source = [one.reward for one in built if one.prompt.source.name == name]
            metrics[f"source/{name}/reward/mean"] = float(np.mean(of_source))
    return metrics


def kept_at_bound(built: Sequence[Built], selection: Selection) -> KeptStatistics:
    """The kept sets of what the policy sampled and is trained on, each with its source's bound."""
    bounds = {one.prompt.source.name: one.prompt.source.bound for one in built}
    statistics = KeptStatistics()
    for sample in selection.samples:
        kept = sample.kept()
        if kept is not None and sample.objective != CROSS_ENTROPY:
            counts = kept.counts[sample.arrays().loss_mask]
            statistics = statistics.merge(KeptStatistics.of(counts, bounds[sample.source]))
    return statistics
