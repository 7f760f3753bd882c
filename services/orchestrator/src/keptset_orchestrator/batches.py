"""From groups to the batch of a step: advantages, arrays aligned with the tokens, the batch's metrics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kept_tokens.messages import TrainingSample, check_samples

from .advantages import group_advantages
from .arrival import Completion
from .rollouts import Group
from .sources import Prompt


def build_samples(groups: Sequence[Group], *, normalize_std: bool, vocab_size: int) -> list[TrainingSample]:
    """A sample for every rollout, group by group, checked as the trainer will check them.

    Args:
        groups: Of one step.
        normalize_std: See `group_advantages`.
        vocab_size: Of the model.

    Raises:
        KeptTokensError: a sample breaks a rule; the text names sample and position.
    """
    samples: list[TrainingSample] = []
    for group in groups:
        advantages = group_advantages(np.asarray(group.rewards), normalize_std=normalize_std)
        for index, completion in enumerate(group.completions):
            samples.append(build_sample(group.prompt, index, completion, float(advantages[index])))
    check_samples(samples, vocab_size)
    return samples


def build_sample(prompt: Prompt, index: int, completion: Completion, advantage: float) -> TrainingSample:
    """Prompt and completion as one sequence.

    Every completion token is trained on, the one that ended it included; the prompt has loss mask, logprob
    and kept counts of 0. The advantage is that of the whole rollout, the same at each of its tokens.

    Args:
        prompt: What was asked.
        index: Of the rollout in its group.
        completion: As it arrived.
        advantage: Of the rollout.
    """
    before, sampled = len(prompt.token_ids), len(completion.token_ids)
    total = before + sampled

    def on_completion(values: ArrayLike, dtype: DTypeLike) -> NDArray[Any]:
        row: NDArray[Any] = np.zeros(total, dtype)
        row[before:] = values
        return row

    return TrainingSample.build(
        token_ids=np.concatenate([np.asarray(prompt.token_ids, np.int32), completion.token_ids]),
        loss_mask=on_completion(1, np.uint8),
        logprobs=on_completion(completion.logprobs, np.float32),
        temperatures=np.full(total, prompt.source.temperature, np.float32),
        advantages=on_completion(advantage, np.float32),
        kept=None if completion.kept is None else completion.kept.pad_tokens(left=before),
        must_have_masks=prompt.source.truncates,
        source=prompt.source.name,
        group=prompt.group,
        sample_id=f"{prompt.group}/{index}",
        weight_versions=[
            (version, before + start, before + end) for version, start, end in completion.weight_versions
        ],
    )


def rollout_metrics(groups: Sequence[Group], samples: Sequence[TrainingSample]) -> dict[str, float]:
    """What a step's row says of its rollouts.

    `rollout/trainable_share` is the share of samples, among those with tokens to train on, whose advantage is
    not zero. With several sources there is also the mean reward of each.
    """
    rewards = np.concatenate([group.rewards for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    cut = np.array([completion.finish_reason == "length" for completion in completions])
    trained = [sample for sample, length in zip(samples, lengths, strict=True) if length]
    moving = sum(bool(sample.arrays().advantages.any()) for sample in trained)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "rollout/trainable_share": moving / len(trained) if trained else 0.0,
        "rollout/tokens": float(lengths.sum()),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/truncated_share": float(cut.mean()),
    }
    names = list(dict.fromkeys(group.prompt.source.name for group in groups))
    if len(names) > 1:
        for name in names:
            of_source = [group.rewards for group in groups if group.prompt.source.name == name]
            metrics[f"source/{name}/reward/mean"] = float(np.concatenate(of_source).mean())
    return metrics
