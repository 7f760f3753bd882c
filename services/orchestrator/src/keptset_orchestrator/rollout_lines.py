"""One line of JSON for each rollout, for people who want to read what was sampled, and how."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .arrival import Completion
from .batches import Built
from .rollouts import Group
from .selection import Selection
from .sources import Prompt, frozen_parameters, most_tokens
from .tokenizer import ChatTokenizer


def rollout_lines(built: Sequence[Built], selection: Selection, tokenizer: ChatTokenizer, room: int) -> bytes:
    """JSONL of the rollouts of a step, in the order of the groups.

    `sampling` is what was asked of the server for this rollout's first turn: every parameter, neutral ones
    and the rest of the context (`room` less the prompt) as max_tokens included, with the seed of its own
    first token. Of a frozen generator it is what was sent; the rest is up to the endpoint. `text` is
    prompt and rollout as they were tokenised.
    """
    return as_lines(
        rollout_line(one, flags, gone, tokenizer, room)
        for one, flags, gone in zip(built, selection.flags, selection.dropped, strict=True)
    )


def eval_lines(groups: Sequence[Group], tokenizer: ChatTokenizer, room: int) -> bytes:
    """JSONL of the rollouts of an evaluation, likewise."""
    return as_lines(
        {
            **what_was_sampled(group.prompt, index, completion, reward, room),
            "text": whole_text(group.prompt, completion, tokenizer),
        }
        for group in groups
        for index, (completion, reward) in enumerate(zip(group.completions, group.rewards, strict=True))
    )


def as_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """JSONL."""
    return b"".join(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows)


def rollout_line(
    one: Built, flags: list[str], dropped: bool, tokenizer: ChatTokenizer, room: int
) -> dict[str, Any]:
    """What is recorded of one rollout of a step."""
    return {
        **what_was_sampled(one.prompt, one.index, one.completion, one.reward, room),
        "objective": one.sample.objective,
        "advantage": one.advantage,
        "cut_tokens": one.cut,
        "filters": flags,
        "dropped": dropped,
        "text": whole_text(one.prompt, one.completion, tokenizer),
    }


def what_was_sampled(
    prompt: Prompt, index: int, completion: Completion, reward: float, room: int
) -> dict[str, Any]:
    """What is recorded of any rollout but its text."""
    frozen = prompt.source.frozen
    return {
        "sample_id": f"{prompt.group}/{index}",
        "source": prompt.source.name,
        "generator": "policy" if frozen is None else f"{frozen.name}, model {frozen.model}",
        "sampling": effective_sampling(prompt, index, room),
        "reward": reward,
        "tokens": int(completion.is_sampled.sum()),
        "context_tokens": int((~completion.is_sampled).sum()),
        "finish_reason": completion.finish_reason,
        "weight_versions": sorted({version for version, _, _ in completion.weight_versions}),
    }


def whole_text(prompt: Prompt, completion: Completion, tokenizer: ChatTokenizer) -> str:
    """Prompt and rollout."""
    return tokenizer.decode([*prompt.token_ids, *completion.token_ids.tolist()])


def effective_sampling(prompt: Prompt, index: int, room: int) -> dict[str, Any]:
    """The sampling parameters of a rollout's first turn, its own seed among them."""
    source = prompt.source
    if source.frozen is not None:
        return {**frozen_parameters(prompt, index, 0), "truncates": source.truncates}
    most = most_tokens(source, len(prompt.token_ids), room)
    own = {"max_tokens": most, "seed": prompt.seed + index}
    return {**source.sampling, "truncates": source.truncates, **own}
