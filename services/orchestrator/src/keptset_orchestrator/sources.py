"""Sources of rollouts: an environment, who answers in it and how, its share of every step's prompts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from keptset_settings import CAPTURE_WIDTH, Filter

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
        prompt_seed: Seed of the environment's examples.
        sampling_seed: Seed that every request's own is derived from.
        group_size: Rollouts of each prompt.
        algorithm: What is made of the rollouts.
        frozen: Who answers; None: the policy.
        sends_seed: A frozen generator's requests carry a seed; those of the policy always do.
        reference: Who scores the rollouts, if the algorithm has a reference that is not the policy.
        filters: Which rollouts are flagged.
        evaluated: The rollouts are only looked at: no masks are asked for, whatever the sampling.
    """

    name: str
    environment: Environment[Any]
    sampling: dict[str, Any]
    truncates: bool
    prompt_seed: int
    sampling_seed: int
    group_size: int = 16
    algorithm: Algorithm = field(default_factory=lambda: Algorithm(partial(grpo, normalize_std=True)))
    frozen: Endpoint | None = None
    sends_seed: bool = True
    reference: Endpoint | None = None
    filters: Sequence[Filter] = ()
    evaluated: bool = False

    @property
    def bound(self) -> int:
        """The most ids of a kept set: top_k, or what capture holds."""
        top_k = int(self.sampling.get("top_k", -1))
        return top_k if top_k > 0 else CAPTURE_WIDTH

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


def step_prompts(
    sources: Sequence[Source], step: int, tokenizer: ChatTokenizer, spans: Sequence[range]
) -> list[Prompt]:
    """The prompts of a step (from 1), a function of the sources' seeds, the step and the spans alone.

    Args:
        sources: In the order of the step.
        step: From 1.
        tokenizer: Renders the conversations.
        spans: For each source, which examples of its environment's stream.

    Raises:
        EnvironmentFaultError: an environment raised, or has no more examples.
        ValueError: the chat template rejects a conversation.
    """
    prompts: list[Prompt] = []
    for source, span in zip(sources, spans, strict=True):
        for example, messages in _ask(source, span) if span else ():
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


def _ask(source: Source, span: range) -> list[tuple[Any, list[dict[str, str]]]]:
    """The examples of one step, at least one, and the conversations to complete."""
    environment = source.environment
    where = f"environment of source {source.name}: examples {span.start} to {span.stop - 1}"
    try:
        examples = islice(environment.examples(source.prompt_seed, span.start), len(span))
        asked = [(example, environment.messages(example)) for example in examples]
    except Exception as error:
        raise EnvironmentFaultError(f"{where}: {type(error).__name__}: {error}") from error
    if len(asked) < len(span):
        raise EnvironmentFaultError(f"{where}: the stream ended after {len(asked)}; it must be endless")
    return asked


def most_tokens(source: Source, before: int, room: int) -> int:
    """The most tokens of a completion of the policy: what the sampling says, else the rest of the room.

    Args:
        source: Of the policy.
        before: Tokens in front of the completion.
        room: The most tokens of one sequence.
    """
    said: int | None = source.sampling.get("max_tokens")
    return room - before if said is None else said


def frozen_parameters(prompt: Prompt, index: int, turn: int) -> dict[str, Any]:
    """What a request to a frozen generator says beside its model and the messages.

    Args:
        prompt: Of a frozen source.
        index: Of the rollout in its group.
        turn: From 0.
    """
    source = prompt.source
    seed = {"seed": derive_seed(prompt.seed, index, turn)} if source.sends_seed else {}
    return {**source.sampling, **seed}


def derive_seed(seed: int, step: int, prompt: int) -> int:
    """The seed of the request for one prompt of a step: 48 bits, which every JSON reader takes unharmed.

    Hashed, because vLLM adds the choice's number to it: seeds that follow each other would share choices.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")
