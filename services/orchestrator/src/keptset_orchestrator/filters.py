"""Filters: rollouts that should not be trained on, by what the policy itself thought of their tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kept_tokens.messages import TrainingSample
from keptset_settings import Filter as FilterSettings
from keptset_settings import GibberishFilter, RepetitionFilter, ZeroAdvantageFilter

from .arrival import Completion


@dataclass(frozen=True)
class Filter:
    """One filter of a source.

    Attributes:
        name: In metrics.
        enforce: Flagged rollouts are left out of the batch; else they are only counted.
        flags: Whether it flags a rollout.
    """

    name: str
    enforce: bool
    flags: Callable[[Completion, TrainingSample], bool]


def gibberish(
    completion: Completion, sample: TrainingSample, *, min_token_id: int, margin: float, vocab_size: int
) -> bool:
    """Is there a rare token that the policy itself found unlikely?

    Rare is an id of at least `min_token_id`, because a BPE vocabulary is in the order of its merges; unlikely
    is a logprob below that of a uniform choice, -log(vocab_size), by more than `margin` (CWM, arXiv
    2510.02387, section 5.2). The threshold is one of the whole vocabulary: over a kept set the same token has
    another logprob.
    """
    rare = completion.token_ids >= min_token_id
    unlikely = completion.logprobs < -math.log(vocab_size) - margin
    return bool((rare & unlikely & completion.is_sampled).any())


def repetition(completion: Completion, sample: TrainingSample, *, window: int, probability: float) -> bool:
    """Were `window` consecutive tokens of one turn all sampled with more than this probability?

    A model that goes round in circles is sure of itself; matching texts would miss loops that vary
    (MiniMax-M1, arXiv 2506.13585, section 3.2). Over kept sets, where a singleton has probability 1, this
    flags good rollouts.
    """
    sure = (completion.logprobs > math.log(probability)) & completion.is_sampled
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sure.astype(np.int8), [0]])))
    longest = int((edges[1::2] - edges[::2]).max(initial=0))
    return longest >= window


def zero_advantage(completion: Completion, sample: TrainingSample) -> bool:
    """Does it move nothing: no advantage at any token, and no reference to compare with?"""
    return sample.reference_weight == 0 and not sample.arrays().advantages.any()


def make_filters(settings: Sequence[FilterSettings], vocab_size: int) -> list[Filter]:
    """The filters that a source's `filter` describes."""
    made: list[Filter] = []
    for one in settings:
        match one:
            case GibberishFilter():
                flags = partial(
                    gibberish, min_token_id=one.min_token_id, margin=one.margin, vocab_size=vocab_size
                )
            case RepetitionFilter():
                flags = partial(repetition, window=one.window, probability=one.probability)
            case ZeroAdvantageFilter():
                flags = zero_advantage
        made.append(Filter(one.kind, one.enforce, flags))
    return made


def without_effect(sample: TrainingSample) -> TrainingSample:
    """The same with advantages, weights and reference that move nothing."""
    arrays = sample.arrays()
    return TrainingSample.build(
        **{**arrays._asdict(), "advantages": np.zeros_like(arrays.advantages)},
        kept=sample.kept(),
        must_have_masks=sample.must_have_masks,
        source=sample.source,
        group=sample.group,
        sample_id=sample.sample_id,
        weight_versions=sample.weight_versions,
        objective=sample.objective,
    )
