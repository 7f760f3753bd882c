"""The groups of a step: those that an earlier orchestrator finished, and new ones for the rest."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from keptset_settings import OrchestratorSettings, PromptShares

from .fleet import Fleet
from .preflight import check_lengths
from .progress import Progress
from .reference import check_reference_lengths
from .rollouts import Attempts, Group, RolloutCollector
from .slots import Slots
from .sources import Prompt, Source, step_prompts
from .state import RunState, StoredGroup
from .stored_groups import fingerprint, pack_group, span_of_versions, unpack_group
from .together import together
from .tokenizer import ChatTokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lengths:
    """What sequences must fit.

    Attributes:
        context: max_model_len of the inference server with the shortest context.
        row: row_tokens of the trainer; None if it does not say.
    """

    context: int
    row: int | None

    @property
    def room(self) -> int:
        """The most tokens of one sequence."""
        return min(self.context, self.row or self.context)


@dataclass(frozen=True)
class Sampled:
    """The groups of a step, and what was counted meanwhile.

    Attributes:
        groups: In the order of the step.
        metrics: For the step's row.
        seconds: From the first request on.
        room: The most tokens that a sequence was given.
    """

    groups: list[Group]
    metrics: dict[str, float]
    seconds: float
    room: int


class StepSampler:
    """Samples one step or several at a time; every group is in the state when it is finished.

    Args:
        settings: How many requests, how long, how often.
        sources: In the order of a step.
        fleet: Who samples.
        tokenizer: Of the policy.
        vocab_size: Of the policy.
        run_id: Begins every request id.
        state: Of the run.
        progress: Is told of requests.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        sources: Sequence[Source],
        fleet: Fleet,
        tokenizer: ChatTokenizer,
        vocab_size: int,
        run_id: str,
        state: RunState,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._run_id = run_id
        self._state = state
        self._progress = progress
        self._shares = PromptShares(
            settings.train.prompts_per_step, [source.ratio for source in settings.train.source]
        )
        self._planning = asyncio.Lock()  # who comes first goes first: steps begin in order
        self._slots: defaultdict[object, Slots] = defaultdict(lambda: Slots(settings.max_concurrent_requests))

    async def sample(self, step: int, lengths: Lengths) -> Sampled:
        """The groups of a step. Several may be sampled at a time, which begin in the order of the steps.

        Raises:
            OrchestratorError: of the first group that cannot be had or breaks a rule; others are cancelled.
        """
        began = time.monotonic()
        prompts = await self._prompts(step)
        check_lengths(prompts, lengths.context, lengths.row)
        check_reference_lengths(prompts, self._tokenizer, lengths.context, lengths.room)
        finished, dropped = await asyncio.to_thread(self._finished, step, prompts, lengths.room)
        async with self.collecting(step, lengths.room) as collector:
            groups = await together(
                self._group(collector, step, position, prompt, finished.get(position))
                for position, prompt in enumerate(prompts)
            )
        metrics = {"rollout/error_rate": collector.counts.error_rate}
        if self._settings.max_async_level or dropped:
            metrics |= {**staleness(groups, step), "staleness/dropped_groups": float(dropped)}
            sampled = [prompt for position, prompt in enumerate(prompts) if position not in finished]
            metrics |= waits(sampled, collector.counts)
        return Sampled(groups, metrics, time.monotonic() - began, lengths.room)

    async def _prompts(self, step: int) -> list[Prompt]:
        """The prompts of a step, the examples of which come after those of the step before."""
        async with self._planning:
            spans = await asyncio.to_thread(self._spans, step)
        return step_prompts(self._sources, step, self._tokenizer, [spans[s.name] for s in self._sources])

    def _spans(self, step: int) -> dict[str, range]:
        # In a thread: where ratios have no short period a run that goes on late counts from its beginning.
        shares = self._shares.spans(step)
        spans = {source.name: span for source, span in zip(self._sources, shares, strict=True)}
        return self._state.cursors(step, spans)

    @asynccontextmanager
    async def collecting(self, step: int, room: int) -> AsyncIterator[RolloutCollector]:
        """A collector for a step or its evaluation, whose requests are counted, however it ends."""
        settings, attempts = self._settings, Attempts()
        try:
            yield RolloutCollector(
                fleet=self._fleet,
                tokenizer=self._tokenizer,
                vocab_size=self._vocab_size,
                room=room,
                step=step,
                slots=self._slots,
                attempts=settings.request_attempts,
                seconds=settings.request_timeout,
                environment_seconds=settings.environment_timeout,
                run_id=self._run_id,
                counts=attempts,
            )
        finally:
            self._progress.requests += attempts.total
            self._progress.failed_requests += attempts.failed

    def _finished(self, step: int, prompts: Sequence[Prompt], room: int) -> tuple[dict[int, Group], int]:
        """Groups that the state holds and that may be trained on, by position; how many are too old."""
        usable: dict[int, Group] = {}
        stale = changed = 0
        oldest = step - 1 - self._settings.max_async_level
        for position, stored in self._state.groups(step).items():
            if position >= len(prompts) or stored.fingerprint != fingerprint(prompts[position], room):
                changed += 1
            elif stored.versions is not None and stored.versions[0] < oldest:
                stale += 1
            else:
                usable[position] = unpack_group(prompts[position], stored.rollouts)
        if usable:
            log.info("step %d: %d finished groups of before a restart are used", step, len(usable))
        if changed:
            log.warning("step %d: %d finished groups are of other settings; sampled again", step, changed)
        if stale:
            log.warning(
                "step %d: %d finished groups were sampled more than max_async_level = %d versions ago; "
                "sampled again",
                step,
                stale,
                self._settings.max_async_level,
            )
        return usable, stale

    async def _group(
        self, collector: RolloutCollector, step: int, position: int, prompt: Prompt, finished: Group | None
    ) -> Group:
        if finished is not None:
            return finished
        group = await collector.group(prompt)
        versions = span_of_versions(group)
        assert versions is None or versions[0] >= step - 1 - self._settings.max_async_level
        asked = fingerprint(prompt, collector.room)
        stored = StoredGroup(prompt.group, prompt.source.name, asked, versions, pack_group(group))
        await asyncio.to_thread(self._state.add_group, step, position, stored)
        return group


def staleness(groups: Sequence[Group], step: int) -> dict[str, float]:
    """How far the weights that sampled a token were behind those that step `step` trains, over the policy's
    tokens; and the share of rollouts that more than one version sampled.
    """
    policy = [one for group in groups for one in group.completions if one.weight_versions]
    spans = [span for one in policy for span in one.weight_versions]
    if not spans:
        return {}
    behind = np.array([step - 1 - version for version, _, _ in spans])
    tokens = np.array([end - start for _, start, end in spans])
    mixed = [len({version for version, _, _ in one.weight_versions}) > 1 for one in policy]
    return {
        "staleness/mean": float((behind * tokens).sum() / tokens.sum()),
        "staleness/max": float(behind.max()),
        "staleness/mixed_share": float(np.mean(mixed)),
    }


def waits(prompts: Sequence[Prompt], counts: Attempts) -> dict[str, float]:
    """Seconds that nine of ten groups at most waited for places; of each source, if there are several."""
    sources = list(dict.fromkeys(prompt.source.name for prompt in prompts))
    metrics = {}
    if prompts:
        metrics["rollout/wait_p90"] = float(np.percentile([counts.wait_of(one) for one in prompts], 90))
    for name in sources if len(sources) > 1 else []:
        of_source = [counts.wait_of(one) for one in prompts if one.source.name == name]
        metrics[f"source/{name}/wait_p90"] = float(np.percentile(of_source, 90))
    return metrics
