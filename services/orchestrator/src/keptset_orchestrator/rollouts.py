"""Collects the rollouts of a step: all rollouts of a prompt together, turn by turn.

The policy's first turn is one request with n = group size, rather than a request a rollout: the prompt is
sent and prefilled once, and a group is sampled by one server, repeated or given up as a whole, so that its
mean is never that of fewer rollouts. Load is balanced by groups, which is fine as long as a step has more
prompts than there are servers. Further turns, and a frozen generator's, are a request each.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from .arrival import Completion, check_answer
from .endpoints import Endpoint, Said, score_tokens
from .environment_calls import call_environment
from .environments import MultiTurn
from .errors import EnvironmentFaultError, OtherWeightsError, RolloutFailedError
from .fleet import Fleet
from .inference import InferenceServer
from .peers import TransientError
from .reference import of_sampled_tokens, prompt_of_reference
from .router import Routed
from .slots import Slots
from .sources import Prompt, derive_seed, frozen_parameters, most_tokens
from .together import together
from .tokenizer import ChatTokenizer
from .turns import follow

T = TypeVar("T")
Asked = TypeVar("Asked", bound=InferenceServer | Routed)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """All rollouts of one prompt, checked and rewarded; rewards[i] is that of completions[i]."""

    prompt: Prompt
    completions: list[Completion]
    rewards: list[float]


@dataclass
class Attempts:
    """Requests sent, those of them that failed (and were sent again), and how long they waited for places."""

    total: int = 0
    failed: int = 0
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By group, for all of it, and by rollout ("<group>/<index>"), for its further turns."""

    def wait_of(self, prompt: Prompt) -> float:
        """Seconds that a group waited for places: the rollout that waited longest, all its turns together."""
        turns = [self.waits[f"{prompt.group}/{index}"] for index in range(prompt.source.group_size)]
        return self.waits[prompt.group] + max(turns)

    @property
    def error_rate(self) -> float:
        """Failed attempts / attempts."""
        return self.failed / self.total if self.total else 0.0


@dataclass(frozen=True)
class RolloutCollector:
    """Samples groups with a fleet of servers, and with the frozen generators of the sources.

    Attributes:
        fleet: Who samples for the policy.
        tokenizer: Decodes completions for their rewards, and encodes what others say.
        vocab_size: Of the model; every id is below it.
        room: The most tokens of one sequence: a rollout ends before a turn that might not fit.
        step: Whose rollouts these are; earlier ones go first.
        slots: Requests in flight over all inference servers (None), and at each other endpoint.
        attempts: At one request, before the run stops.
        seconds: For one request.
        environment_seconds: For one call of an environment.
        run_id: Begins every request id, so that two runs on one server do not meet.
        backoff: Seconds before the second attempt; doubled before each further one, 10 at most.
    """

    fleet: Fleet
    tokenizer: ChatTokenizer
    vocab_size: int
    room: int
    step: int
    slots: Mapping[Endpoint | None, Slots]
    attempts: int
    seconds: float
    environment_seconds: float
    run_id: str
    backoff: float = 0.2
    counts: Attempts = field(default_factory=Attempts)

    async def collect(self, prompts: Sequence[Prompt]) -> list[Group]:
        """The groups of all prompts, in their order.

        Raises:
            OrchestratorError: of the first group that cannot be had or breaks a rule; others are cancelled.
        """
        return await together(self.group(prompt) for prompt in prompts)

    async def group(self, prompt: Prompt) -> Group:
        """All rollouts of one prompt; raises like `collect`."""
        try:
            return await self._group(prompt)
        finally:
            self.fleet.forget(self._prefix(prompt))

    async def _group(self, prompt: Prompt) -> Group:
        size = prompt.source.group_size
        if prompt.source.frozen is not None:
            completions = await together(
                self._frozen_rollout(prompt, prompt.source.frozen, index) for index in range(size)
            )
        else:
            first = await self._sample(prompt, prompt.token_ids, size, prompt.seed, prompt.group)
            completions = await together(self._go_on(prompt, index, one) for index, one in enumerate(first))
        if prompt.source.algorithm.reference_weight > 0:
            before = prompt_of_reference(prompt, self.tokenizer)
            completions = await together(
                self._score(prompt, before, index, one) for index, one in enumerate(completions)
            )
        return await self._reward(prompt, completions)

    async def _sample(
        self, prompt: Prompt, token_ids: list[int], n: int, seed: int, name: str
    ) -> list[Completion]:
        """`n` completions of some ids by the policy, checked; `name` is that of the request."""
        source = prompt.source
        # Said also where it is the rest of the context: a server with a longer one would fill that.
        most = most_tokens(source, len(token_ids), self.room)

        async def once(server: InferenceServer | Routed, request_id: str, what: str) -> list[Completion]:
            body = generate_body(prompt, token_ids, n, seed, request_id, most)
            oldest, starts = server.version, server.starts
            answer = await server.generate(body, seconds=self.seconds, what=what)
            newest = self.fleet.version
            assert oldest is not None, "weights are loaded before the first rollout"
            assert newest is not None
            try:
                return await asyncio.to_thread(
                    check_answer,
                    answer,
                    where=f"{server.name}: {what}",
                    request_id=request_id,
                    choices=n,
                    vocab_size=self.vocab_size,
                    truncates=source.truncates and not source.evaluated,
                    max_tokens=most,
                    oldest_version=oldest,
                    newest_version=newest,
                )
            except OtherWeightsError as error:
                # One that was started again between two requests carries what it was started with.
                if not await self.fleet.was_started_again(server, starts):
                    raise
                raise TransientError(f"{error}; it was started again", lost=False) from error

        return await self._by_fleet(prompt, name, once, self.fleet.sampler)

    async def _by_fleet(
        self,
        prompt: Prompt,
        name: str,
        once: Callable[[Asked, str, str], Awaitable[T]],
        pick: Callable[[InferenceServer | Routed | None, str], Awaitable[Asked]],
    ) -> T:
        """A request to whom `pick` says: the group's server, or the one with the fewest; another attempt goes
        to another server if it can.
        """
        failed_at: InferenceServer | Routed | None = None

        async def attempt(number: int) -> T:
            nonlocal failed_at
            server = await pick(failed_at, self._prefix(prompt))
            request_id = f"{self.run_id}-{name.replace('/', '-')}-{number}"
            try:
                return await once(server, request_id, f"request {request_id} (source {prompt.source.name})")
            except TransientError as error:
                failed_at = server
                await self.fleet.note_failure(server, error)
                raise

        who = "/".join(name.split("/")[: prompt.group.count("/") + 2])
        return await self._patiently(None, who, f"group {prompt.group}", attempt)

    async def _patiently(
        self, at: Endpoint | None, who: str, what: str, attempt: Callable[[int], Awaitable[T]]
    ) -> T:
        """Repeat an attempt while it fails transiently; takes a slot of the fleet (None) or of an
        endpoint.
        """
        async with self.slots[at].hold(self.step) as waited:
            self.counts.waits[who] += waited
            pause = 0.0
            for number in range(1, self.attempts + 1):
                if number > 1:
                    await asyncio.sleep(max(pause, min(10.0, self.backoff * 2 ** (number - 2))))
                self.counts.total += 1
                try:
                    return await attempt(number)
                except TransientError as error:
                    self.counts.failed += 1
                    failure, pause = str(error), error.pause
                    log.warning("%s (attempt %d of %d)", failure, number, self.attempts)
        raise RolloutFailedError(
            f"{what}: {self.attempts} attempts failed (request_attempts); the last: {failure}"
        )

    async def _go_on(self, prompt: Prompt, index: int, rollout: Completion) -> Completion:
        """The further turns of one rollout of the policy, while the environment answers it."""
        if not isinstance(prompt.source.environment, MultiTurn):
            return rollout
        texts = [self._text_of_last_turn(rollout)]
        while rollout.finish_reason == "stop":
            reply = await self._reply(prompt, index, texts)
            if reply is None:
                break
            last = int(rollout.token_ids[-1]) if len(rollout.token_ids) else None
            context = self.tokenizer.encode_reply(last, reply)
            so_far = [*prompt.token_ids, *rollout.token_ids.tolist(), *context]
            if len(so_far) + (prompt.source.sampling.get("max_tokens") or 1) > self.room:
                return replace(rollout, finish_reason="length")
            turn = len(texts)
            seed = derive_seed(prompt.seed, index, turn)
            name = f"{prompt.group}/{index}/turn-{turn}"
            (said,) = await self._sample(prompt, so_far, 1, seed, name)
            rollout = follow(rollout, context, said)
            texts.append(self._text_of_last_turn(said))
        return rollout

    async def _frozen_rollout(self, prompt: Prompt, endpoint: Endpoint, index: int) -> Completion:
        """One rollout of a frozen generator: what it says, tokenised here, with no logprobs and no masks."""
        messages, texts = list(prompt.messages), list[str]()
        rollout: Completion | None = None
        context: list[int] = []
        while True:
            turn = len(texts)
            parameters = frozen_parameters(prompt, index, turn)
            what = f"rollout {prompt.group}/{index}, turn {turn} (source {prompt.source.name})"

            async def once(
                _: int,
                messages: list[dict[str, str]] = messages,
                parameters: dict[str, Any] = parameters,
                what: str = what,
            ) -> Said:
                return await endpoint.chat(messages, parameters, seconds=self.seconds, what=what)

            who = f"{prompt.group}/{index}"
            said = await self._patiently(endpoint, who, f"rollout {who}", once)
            last = self._as_said(said)
            rollout = last if rollout is None else follow(rollout, context, last)
            texts.append(said.text)
            reply = await self._reply(prompt, index, texts) if said.finish_reason == "stop" else None
            if reply is None:
                return rollout
            # The end of a turn that its model did not say is context, as all that the template writes.
            context = self.tokenizer.encode_reply(self.tokenizer.eos_token_id if said.ended else None, reply)
            messages = [*messages, {"role": "assistant", "content": said.text}, *reply]

    def _as_said(self, said: Said) -> Completion:
        ids = self.tokenizer.encode_as_said(said.text)
        if said.ended and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        token_ids = np.array(ids, np.int32)
        return Completion(token_ids, np.zeros(len(ids), np.float32), None, said.finish_reason, None, [])

    async def _score(
        self, prompt: Prompt, before: list[int], index: int, completion: Completion
    ) -> Completion:
        """The completion with what the reference says of its tokens."""
        token_ids = [*before, *completion.token_ids.tolist()]
        endpoint, name = prompt.source.reference, f"{prompt.group}/{index}/reference"
        if prompt.source.algorithm.hint is not None:

            async def at_server(server: InferenceServer, request_id: str, what: str) -> Any:
                return await score_tokens(
                    server, "/v1/completions", None, token_ids, seconds=self.seconds, what=what
                )

            scores = await self._by_fleet(prompt, name, at_server, self.fleet.pick)
        else:
            assert endpoint is not None, "the settings name a reference"
            what = f"rollout {prompt.group}/{index} (source {prompt.source.name})"

            async def once(_: int) -> Any:
                return await endpoint.score(token_ids, seconds=self.seconds, what=what)

            who = f"{prompt.group}/{index}"
            scores = await self._patiently(endpoint, who, f"reference of rollout {who}", once)
        return replace(completion, reference=of_sampled_tokens(scores, before, completion))

    def _prefix(self, prompt: Prompt) -> str:
        """Names what the requests of a group begin with; two runs on one server do not meet."""
        return f"{self.run_id}/{prompt.group}"

    def _text_of_last_turn(self, completion: Completion) -> str:
        return self.tokenizer.completion_text(completion.last_turn(), completion.stop_token_id)

    async def _reply(self, prompt: Prompt, index: int, texts: list[str]) -> list[dict[str, str]] | None:
        environment = prompt.source.environment
        if not isinstance(environment, MultiTurn):
            return None
        return await call_environment(
            environment.reply,
            prompt.example,
            texts,
            seconds=self.environment_seconds,
            what=f"{_where(prompt, index)}: reply to turn {len(texts)}",
        )

    async def _reward(self, prompt: Prompt, completions: list[Completion]) -> Group:
        rewards: list[float] = []
        for index, completion in enumerate(completions):
            reward = await call_environment(
                lambda text: float(prompt.source.environment.reward(prompt.example, text)),
                self._text_of_last_turn(completion),
                seconds=self.environment_seconds,
                what=f"{_where(prompt, index)}: reward",
            )
            if not math.isfinite(reward):
                where = _where(prompt, index)
                raise EnvironmentFaultError(f"{where}: reward {reward} is not a finite number")
            rewards.append(reward)
        return Group(prompt, completions, rewards)


def _where(prompt: Prompt, index: int) -> str:
    return f"environment of source {prompt.source.name}: rollout {prompt.group}/{index}"


def generate_body(
    prompt: Prompt, token_ids: list[int], n: int, seed: int, request_id: str, max_tokens: int
) -> dict[str, Any]:
    """The body of a request; logprobs=0 asks for the sampled token's.

    Truncation gets masks by itself. `kept_tokens` says that nothing else will do, so that a server that takes
    this for whole (a top_k beyond the vocabulary) sends them or refuses. For training it is never false:
    masks that come unexpected tell of a difference, which an answer without them would hide. An evaluation
    wants none.
    """
    source = prompt.source
    body = {
        "request_id": request_id,
        "token_ids": token_ids,
        "sampling_params": {
            **source.sampling,
            "max_tokens": max_tokens,
            "n": n,
            "seed": seed,
            "logprobs": 0,
        },
    }
    if source.evaluated:
        return {**body, "kept_tokens": False}
    return {**body, "kept_tokens": True} if source.truncates else body
