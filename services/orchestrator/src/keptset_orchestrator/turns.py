"""Rollouts of several turns: sampled tokens and context in one sequence, ids as they were sampled."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kept_tokens import KeptTokens

from .arrival import Completion


def follow(rollout: Completion, context: Sequence[int], turn: Completion) -> Completion:
    """A rollout with one more turn behind some context.

    The context has no logprobs, no masks (count 0) and no weight version, and is not trained on. Ids are
    never decoded and encoded again: what the policy sampled stays as it was.

    Args:
        rollout: The turns so far.
        context: Ids of what the environment said, with the marks of the turns.
        turn: The next completion, sampled from all of that.

    Raises:
        ValueError: one of them has masks and the other has none.
    """
    if (rollout.kept is None) != (turn.kept is None):
        raise ValueError("a rollout has masks in all of its turns or in none")
    before, between = len(rollout.token_ids), len(context)
    start = before + between
    kept = None
    if rollout.kept is not None and turn.kept is not None:
        kept = KeptTokens.concat([rollout.kept.pad_tokens(right=between), turn.kept])
    return replace(
        turn,
        token_ids=np.concatenate([rollout.token_ids, np.asarray(context, np.int32), turn.token_ids]),
        logprobs=np.concatenate([rollout.logprobs, np.zeros(between, np.float32), turn.logprobs]),
        kept=kept,
        weight_versions=[
            *rollout.weight_versions,
            *((version, start + first, start + last) for version, first, last in turn.weight_versions),
        ],
        sampled=np.concatenate([rollout.is_sampled, np.zeros(between, bool), turn.is_sampled]),
    )
