"""Sources of rollouts: an environment, who answers in it and how, its share of every step's prompts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from keptset_settings import Filter

from .algorithms import Algorithm, grpo
from .endpoints import Endpoint
from .environments import Environment
from .errors import EnvironmentFaultError
from .tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Source:
    """Where rollouts come from.

    Attributes:
        name: In samples, metrics and errors.
        environment: What is asked and how an answer is rewarded.
        sampling: Every sampling parameter but n and seed, by vLLM's names; what is left out is neutral.
        truncates: The sampling limits its support: every sampled token comes with a kept set.
        prompts: Prompts of this source in each step.
        prompt_seed: Seed of the environment's examples.
        sampling_seed: Seed that every request's own is derived from.
        group_size: Rollouts of each prompt.
        algorithm: What is made of the rollouts.
        frozen: Who answers; None: the policy.
        reference: Who scores the rollouts, if the algorithm has a reference that is not the policy.
        filters: Which rollouts are flagged.
        evaluated: The rollouts are only looked at: no masks are asked for, whatever the sampling.
    """

    name: str
    environment: Environment[Any]
    sampling: dict[str, Any]
    truncates: bool
    prompts: int
    prompt_seed: int
    sampling_seed: int
    group_size: int = 16
    algorithm: Algorithm = field(default_factory=lambda: Algorithm(partial(grpo, normalize_std=True)))
    frozen: Endpoint | None = None
    reference: Endpoint | None = None
    filters: Sequence[Filter] = ()
    evaluated: bool = False

    @property
    def temperature(self) -> float:
        """Divides the logits; that of a likelihood, 1, for what a frozen generator said."""
        return 1.0 if self.frozen is not None else float(self.sampling["temperature"])


@dataclass(frozen=True)
class Prompt:
    """One prompt of a step; its rollouts are a group.

    Attributes:
        source: Where it comes from.
        group: "<source>/<step>/<prompt in the step>".
        example: What the environment asked.
        token_ids: The rendered conversation.
        seed: The request's seed; vLLM samples choice i with seed + i.
        messages: The conversation.
    """

    source: Source
    group: str
    example: Any
    token_ids: list[int]
    seed: int
    messages: Sequence[dict[str, str]] = ()


def share_prompts(prompts_per_step: int, ratios: Sequence[float]) -> list[int]:
    """How many of a step's prompts each source gets: largest remainder, ties to the earlier source.

    Every step has the same shares, so that the batch of step n depends on n alone.

    Raises:
        ValueError: a source would get none.
    """
    total = sum(ratios)
    exact = [prompts_per_step * ratio / total for ratio in ratios]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(ratios)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: prompts_per_step - sum(shares)]:
        shares[i] += 1
    for i, share in enumerate(shares):
        if share == 0:
            raise ValueError(
                f"orchestrator.train.source[{i}].ratio = {ratios[i]}: its share of {prompts_per_step} "
                "prompts a step is none; raise its ratio or train.prompts_per_step"
            )
    return shares


def step_prompts(sources: Sequence[Source], step: int, tokenizer: ChatTokenizer) -> list[Prompt]:
    """The prompts of a step (from 1), a function of the sources' seeds and the step alone.

    Raises:
        EnvironmentFaultError: an environment raised, or has no more examples.
        ValueError: the chat template rejects a conversation.
    """
    prompts: list[Prompt] = []
    for source in sources:
        for example, messages in _ask(source, (step - 1) * source.prompts):
            index = len(prompts)
            prompts.append(
                Prompt(
                    source=source,
                    group=f"{source.name}/{step}/{index}",
                    example=example,
                    token_ids=tokenizer.encode_messages(messages),
                    seed=derive_seed(source.sampling_seed, step, index),
                    messages=messages,
                )
            )
    return prompts


def _ask(source: Source, start: int) -> list[tuple[Any, list[dict[str, str]]]]:
    """The examples of one step, and the conversations to complete."""
    environment = source.environment
    where = f"environment of source {source.name}: examples {start} to {start + source.prompts - 1}"
    try:
        examples = islice(environment.examples(source.prompt_seed, start), source.prompts)
        asked = [(example, environment.messages(example)) for example in examples]
    except Exception as error:
        raise EnvironmentFaultError(f"{where}: {type(error).__name__}: {error}") from error
    if len(asked) < source.prompts:
        raise EnvironmentFaultError(f"{where}: the stream ended after {len(asked)}; it must be endless")
    return asked


def derive_seed(seed: int, step: int, prompt: int) -> int:
    """The seed of the request for one prompt of a step: 48 bits, which every JSON reader takes unharmed.

    Hashed, because vLLM adds the choice's number to it: seeds that follow each other would share choices.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")
