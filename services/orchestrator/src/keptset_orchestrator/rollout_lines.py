"""One line of JSON for each rollout of a step, for people who want to read what was sampled, and how."""

import json
from collections.abc import Sequence
from typing import Any

from .batches import Built
from .selection import Selection
from .sources import derive_seed
from .tokenizer import ChatTokenizer


def rollout_lines(built: Sequence[Built], selection: Selection, tokenizer: ChatTokenizer) -> bytes:
    """JSONL, in the order of the groups.

    `sampling` is what was asked of the server for this rollout: every parameter that is not neutral by being
    left out, with the seed of its own first token. `text` is prompt and rollout as they were tokenised.
    """
    return b"".join(
        json.dumps(rollout_line(one, flags, gone, tokenizer), ensure_ascii=False, allow_nan=False).encode()
        + b"\n"
        for one, flags, gone in zip(built, selection.flags, selection.dropped, strict=True)
    )


def rollout_line(one: Built, flags: list[str], dropped: bool, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What is recorded of one rollout."""
    prompt, completion = one.prompt, one.completion
    return {
        "sample_id": one.sample.sample_id,
        "source": prompt.source.name,
        "generator": "policy" if prompt.source.frozen is None else prompt.source.frozen.name,
        "sampling": effective_sampling(one),
        "objective": one.sample.objective,
        "reward": one.reward,
        "advantage": one.advantage,
        "tokens": int(completion.is_sampled.sum()),
        "context_tokens": int((~completion.is_sampled).sum()),
        "finish_reason": completion.finish_reason,
        "cut_tokens": one.cut,
        "weight_versions": sorted({version for version, _, _ in completion.weight_versions}),
        "filters": flags,
        "dropped": dropped,
        "text": tokenizer.decode([*prompt.token_ids, *completion.token_ids.tolist()]),
    }


def effective_sampling(one: Built) -> dict[str, Any]:
    """The sampling parameters of a rollout, its own seed (of the first turn) among them."""
    source, seed = one.prompt.source, one.prompt.seed
    own = seed + one.index if source.frozen is None else derive_seed(seed, one.index, 0)
    return {**source.sampling, "truncates": source.truncates, "seed": own}
