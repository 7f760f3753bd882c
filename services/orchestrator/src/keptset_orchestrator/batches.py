"""From groups to the samples of a step: advantages, and arrays aligned with the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kept_tokens.messages import (
    CROSS_ENTROPY,
    POLICY_GRADIENT,
    TrainingSample,
    check_samples,
    cut_sample,
)

from .algorithms import reference_advantages
from .arrival import Completion
from .rollouts import Group
from .sources import Prompt


@dataclass(frozen=True)
class Built:
    """One rollout as a sample.

    Attributes:
        prompt: What was asked.
        index: Of the rollout in its group.
        completion: As it arrived.
        reward: Of the environment.
        advantage: Of the rollout in its group.
        sample: What the trainer would get.
        cut: Tokens at its end that did not fit.
    """

    prompt: Prompt
    index: int
    completion: Completion
    reward: float
    advantage: float
    sample: TrainingSample
    cut: int = 0


def build_samples(
    groups: Sequence[Group],
    *,
    vocab_size: int,
    full_scores: bool = False,
    row_tokens: int | None = None,
) -> list[Built]:
    """A sample for every rollout, group by group, checked as the trainer will check them.

    Args:
        groups: Of one step.
        vocab_size: Of the model.
        full_scores: The trainer compares with the reference itself, over the whole vocabulary.
        row_tokens: What a frozen generator said beyond this is cut off; None: nothing is.

    Raises:
        KeptTokensError: a sample breaks a rule; the text names sample and position.
        ValueError: rewards that the algorithm cannot take; the text names the group.
    """
    built: list[Built] = []
    for group in groups:
        try:
            advantages = group.prompt.source.algorithm.advantages(np.asarray(group.rewards, np.float64))
        except ValueError as error:
            raise ValueError(f"group {group.prompt.group}: {error}") from error
        for index, completion in enumerate(group.completions):
            advantage = float(advantages[index])
            sample = build_sample(group.prompt, index, completion, advantage, full_scores)
            cut = 0
            if row_tokens is not None and group.prompt.source.frozen is not None:
                cut = max(0, sample.num_tokens - row_tokens)
                sample = cut_sample(sample, 0, sample.num_tokens - cut)
            reward = group.rewards[index]
            built.append(Built(group.prompt, index, completion, reward, advantage, sample, cut))
    check_samples([one.sample for one in built], vocab_size)
    return built


def build_sample(
    prompt: Prompt, index: int, completion: Completion, advantage: float, full_scores: bool = False
) -> TrainingSample:
    """Prompt and rollout as one sequence.

    Every sampled token is trained on, the one that ended a turn included; the prompt and context between
    turns have loss mask, logprob and kept counts of 0. The advantage is that of the whole rollout, the same
    at each of its tokens, plus what a reference says of each.

    Args:
        prompt: What was asked.
        index: Of the rollout in its group.
        completion: As it arrived.
        advantage: Of the rollout; with cross-entropy its weight.
        full_scores: Leave the comparison with the reference to the trainer, which has the policy's logprobs
            over the whole vocabulary. Without it the rollout's are taken, which are the same where nothing
            truncates.
    """
    before, after = len(prompt.token_ids), len(completion.token_ids)
    total, algorithm = before + after, prompt.source.algorithm

    def behind(values: ArrayLike, dtype: DTypeLike) -> NDArray[Any]:
        row: NDArray[Any] = np.zeros(total, dtype)
        row[before:] = values
        return row

    advantages = np.where(completion.is_sampled, np.float32(advantage), np.float32(0))
    reference: NDArray[np.float32] | None = None
    if completion.reference is not None:
        if full_scores:
            reference = behind(completion.reference, np.float32)
        else:
            advantages = advantages + reference_advantages(
                completion.reference, completion.logprobs, algorithm.reference_weight
            )
    return TrainingSample.build(
        token_ids=np.concatenate([np.asarray(prompt.token_ids, np.int32), completion.token_ids]),
        loss_mask=behind(completion.is_sampled, np.uint8),
        logprobs=behind(completion.logprobs, np.float32),
        temperatures=np.full(total, prompt.source.temperature, np.float32),
        advantages=behind(advantages, np.float32),
        kept=None if completion.kept is None else completion.kept.pad_tokens(left=before),
        must_have_masks=prompt.source.truncates,
        source=prompt.source.name,
        group=prompt.group,
        sample_id=f"{prompt.group}/{index}",
        weight_versions=[
            (version, before + start, before + end) for version, start, end in completion.weight_versions
        ],
        objective=CROSS_ENTROPY if algorithm.cross_entropy else POLICY_GRADIENT,
        reference_logprobs=reference,
        reference_weight=0.0 if reference is None else algorithm.reference_weight,
    )
