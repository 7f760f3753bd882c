"""Collects the rollouts of a step: one request a prompt, all of its rollouts in it.

One request with n = group size, rather than a request a rollout: the prompt is sent and prefilled once, and a
group is sampled by one server, repeated or given up as a whole, so that its mean is never that of fewer
rollouts. Load is balanced by groups, which is fine as long as a step has more prompts than there are servers.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .arrival import Completion, check_answer
from .errors import EnvironmentFaultError, RolloutFailedError
from .fleet import Fleet
from .inference import InferenceServer
from .peers import TransientError
from .sources import Prompt
from .together import together
from .tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Group:
    """All rollouts of one prompt, checked and rewarded; rewards[i] is that of completions[i]."""

    prompt: Prompt
    completions: list[Completion]
    rewards: list[float]


@dataclass
class Attempts:
    """Requests sent, and how many of them failed (and were sent again)."""

    total: int = 0
    failed: int = 0

    @property
    def error_rate(self) -> float:
        """Failed attempts / attempts."""
        return self.failed / self.total if self.total else 0.0


@dataclass(frozen=True)
class RolloutCollector:
    """Samples groups with a fleet of servers.

    Attributes:
        fleet: Who samples.
        tokenizer: Decodes completions for their rewards.
        group_size: Rollouts of a prompt.
        vocab_size: Of the model; every id is below it.
        concurrency: Requests in flight over all servers.
        attempts: At one group, before the run stops.
        seconds: For one request.
        run_id: Begins every request id, so that two runs on one server do not meet.
        backoff: Seconds before the second attempt; doubled before each further one, 10 at most.
    """

    fleet: Fleet
    tokenizer: ChatTokenizer
    group_size: int
    vocab_size: int
    concurrency: int
    attempts: int
    seconds: float
    run_id: str
    backoff: float = 0.2
    counts: Attempts = field(default_factory=Attempts)

    async def collect(self, prompts: Sequence[Prompt], weight_version: int) -> list[Group]:
        """The groups of all prompts, in their order.

        Raises:
            OrchestratorError: of the first group that cannot be had or breaks a rule; others are cancelled.
        """
        slots = asyncio.Semaphore(self.concurrency)

        async def one(prompt: Prompt) -> Group:
            async with slots:
                completions = await self._sample(prompt, weight_version)
            return await asyncio.to_thread(self._reward, prompt, completions)

        return await together(one(prompt) for prompt in prompts)

    async def _sample(self, prompt: Prompt, weight_version: int) -> list[Completion]:
        failed_at: InferenceServer | None = None
        failures: list[str] = []
        for attempt in range(1, self.attempts + 1):
            if attempt > 1:
                await asyncio.sleep(min(10.0, self.backoff * 2 ** (attempt - 2)))
            server = await self.fleet.pick(avoid=failed_at)
            request_id = f"{self.run_id}-{prompt.group.replace('/', '-')}-{attempt}"
            what = f"request {request_id} (source {prompt.source.name})"
            self.counts.total += 1
            try:
                answer = await server.generate(
                    generate_body(prompt, self.group_size, request_id), seconds=self.seconds, what=what
                )
            except TransientError as error:
                self.counts.failed += 1
                failures.append(str(error))
                failed_at = server
                if error.lost:
                    self.fleet.report_loss(server)
                continue
            return await asyncio.to_thread(
                check_answer,
                answer,
                where=f"{server.name}: {what}",
                request_id=request_id,
                choices=self.group_size,
                vocab_size=self.vocab_size,
                truncates=prompt.source.truncates,
                weight_version=weight_version,
            )
        raise RolloutFailedError(
            f"group {prompt.group}: {self.attempts} attempts failed (request_attempts); "
            f"the last: {failures[-1]}"
        )

    def _reward(self, prompt: Prompt, completions: list[Completion]) -> Group:
        rewards: list[float] = []
        for index, completion in enumerate(completions):
            text = self.tokenizer.completion_text(completion.token_ids.tolist(), completion.stop_token_id)
            where = f"environment of source {prompt.source.name}: rollout {prompt.group}/{index}"
            try:
                reward = float(prompt.source.environment.reward(prompt.example, text))
            except Exception as error:
                raise EnvironmentFaultError(
                    f"{where}: reward raised {type(error).__name__}: {error}"
                ) from error
            if not math.isfinite(reward):
                raise EnvironmentFaultError(f"{where}: reward {reward} is not a finite number")
            rewards.append(reward)
        return Group(prompt, completions, rewards)


def generate_body(prompt: Prompt, group_size: int, request_id: str) -> dict[str, Any]:
    """The body of a group's request; logprobs=0 asks for the sampled token's.

    Truncation gets masks by itself. `kept_tokens` says that nothing else will do, so that a server that takes
    this for whole (a top_k beyond the vocabulary) sends them or refuses. It is never false: masks that come
    unexpected tell of a difference, which an answer without them would hide.
    """
    body = {
        "request_id": request_id,
        "token_ids": prompt.token_ids,
        "sampling_params": {**prompt.source.sampling, "n": group_size, "seed": prompt.seed, "logprobs": 0},
    }
    return {**body, "kept_tokens": True} if prompt.source.truncates else body
