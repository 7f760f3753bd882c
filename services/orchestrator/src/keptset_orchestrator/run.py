"""The run: sample, hand in, wait, update the weights, write the row; and how to go on after a crash."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from kept_tokens.messages import StepResult, TrainingBatch, encode
from keptset_settings import EndpointSettings, OrchestratorSettings, resolve_orchestrator

from .batches import build_samples
from .build import build_evaluations, build_sources
from .errors import OrchestratorError, PeerMismatchError
from .evaluation import Evaluation
from .fleet import Fleet
from .inference import InferenceServer, InferenceStatus
from .metrics_file import MetricsFile
from .preflight import check_lengths, check_server, check_trainer
from .progress import Progress
from .reference import check_reference_lengths
from .rollout_lines import rollout_lines
from .rollout_records import RolloutRecord, RolloutRecords
from .rollouts import Attempts, RolloutCollector
from .selection import rollout_metrics, select
from .sources import Source, step_prompts
from .together import together
from .tokenizer import ChatTokenizer
from .trainer import OtherBatchError, Trainer, TrainerStatus

log = logging.getLogger(__name__)


async def run(settings: OrchestratorSettings, progress: Progress) -> None:
    """Do all steps that are still to be done, and return.

    Raises:
        OrchestratorError: a peer or an environment is at fault; the text names it.
        ValueError: the settings, the tokenizer or files of an earlier run are at fault.
    """
    settings = resolve_orchestrator(settings)
    trainer_url, output_dir = settings.trainer_url, settings.output_dir
    assert trainer_url is not None
    assert output_dir is not None
    assert settings.tokenizer is not None
    tokenizer = await asyncio.to_thread(ChatTokenizer, settings.tokenizer)
    output_dir.mkdir(parents=True, exist_ok=True)
    key, token = (
        None if secret is None else secret.get_secret_value()
        for secret in (settings.inference_api_key, settings.internal_token)
    )
    # No proxy stands between the services, whatever the environment says. Time-outs are around whole calls.
    # Idle connections are dropped before uvicorn does so (5 s), lest a request meets one that closes.
    limits = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=settings.max_concurrent_requests + 4,
        keepalive_expiry=2.0,
    )
    # Certificates take a tenth of a second to load and are looked at only where https is spoken.
    https = any(
        url.startswith("https:") for url in (trainer_url, *settings.inference_urls, *foreign_urls(settings))
    )
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=https) as client:
        trainer = Trainer(trainer_url, client, token)
        servers = [InferenceServer(url, client, key, token) for url in settings.inference_urls]
        build_sources(settings, 1, client)  # what is wrong with them shows before anybody is waited for
        await together(peer.wait_healthy(settings.startup_timeout) for peer in (trainer, *servers))
        status = await trainer.status(seconds=settings.startup_timeout)
        sources = build_sources(settings, status.vocab_size, client)
        check_trainer(trainer.name, status, sources)
        context = _Context(sources, trainer, status)
        fleet = Fleet(
            servers,
            context.check,
            startup_timeout=settings.startup_timeout,
            weights_timeout=settings.weights_timeout,
        )
        try:
            await fleet.inspect()
            loop = _Loop(settings, progress, context, fleet, tokenizer, output_dir)
            first = await loop.come_back(status)
            for step in range(first, settings.steps + 1):
                await loop.do(step)
        finally:
            await fleet.close()
    progress.state = "done"


def foreign_urls(settings: OrchestratorSettings) -> list[str]:
    """The URLs of endpoints that are not ours."""
    endpoints = [*(s.generator for s in settings.train.source), *(s.reference for s in settings.train.source)]
    return [one.url for one in endpoints if isinstance(one, EndpointSettings)]


@dataclass
class _Context:
    """What every server is checked against; remembers the shortest context among them."""

    sources: Sequence[Source]
    trainer: Trainer
    status: TrainerStatus
    max_model_len: int | None = None

    def check(self, server: InferenceServer, status: InferenceStatus) -> None:
        check_server(server.name, status, self.sources, self.trainer.name, self.status)
        log.info("%s: %s, vLLM %s, capture %s", server.name, status.model, status.vllm, status.capture.kind)
        shortest = self.max_model_len or status.max_model_len
        self.max_model_len = min(shortest, status.max_model_len)


class _Loop:
    """The steps of a run."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        progress: Progress,
        context: _Context,
        fleet: Fleet,
        tokenizer: ChatTokenizer,
        output_dir: Path,
    ) -> None:
        self.settings = settings
        self.progress = progress
        self.context = context
        self.trainer = context.trainer
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.run_id = uuid.uuid4().hex[:8]
        self.evaluations: Sequence[Evaluation] = build_evaluations(settings)
        self.records = RolloutRecords(output_dir / "rollouts")
        self.rows = MetricsFile(output_dir / "metrics.jsonl", context.status.next_step)

    async def come_back(self, status: TrainerStatus) -> int:
        """Finish what an earlier orchestrator handed in; returns the first step to sample.

        An accepted batch wins: its step is not sampled again. Its row, if it is missing, is completed from
        the record that was written before the batch was handed in.
        """
        accepted = status.next_step - 1
        missing = sorted(set(range(1, accepted + 1)) - self.rows.steps)
        if missing and missing != [accepted]:
            log.warning(
                "the trainer has step %d already, but %s lacks rows %s, which cannot be completed",
                accepted,
                self.rows.path,
                [step for step in missing if step < accepted],
            )
        if accepted == 0 or accepted not in missing:
            seconds = await self._load_weights(
                accepted if accepted == 0 else (await self._result(accepted)).weight_version
            )
            log.info("weights version %d is in place (%.1f s)", self.progress.weight_version, seconds)
        else:
            log.info("step %d was handed in before; waiting for the trainer", accepted)
            record = self.records.find(accepted)
            sampling = record.metrics["seconds/rollout"] if record else 0.0
            await self._finish(accepted, record, time.monotonic() - sampling)
        self.progress.step = accepted
        if accepted >= self.settings.steps:
            log.info("all %d steps are done", self.settings.steps)
        return accepted + 1

    async def do(self, step: int) -> None:
        """One step, from its prompts to its row."""
        began = time.monotonic()
        self.progress.step = step
        self.progress.state = "rollout"
        batch, record, lines = await self._sample(step)
        record.metrics["seconds/rollout"] = time.monotonic() - began
        self.progress.state = "train"
        record = await self._hand_in(step, batch, record, lines)
        await self._finish(step, record, began)

    async def _sample(self, step: int) -> tuple[TrainingBatch, RolloutRecord, bytes]:
        """The batch of a step, what its row says of its rollouts, and the rollouts as lines."""
        version, status = self.progress.weight_version, self.context.status
        assert version is not None, "weights are loaded before the first rollout"
        prompts = step_prompts(self.context.sources, step, self.tokenizer)
        assert self.context.max_model_len is not None, "servers are inspected before the first rollout"
        check_lengths(prompts, self.context.max_model_len, status.row_tokens)
        check_reference_lengths(prompts, self.tokenizer, self.context.max_model_len)
        room = min(self.context.max_model_len, status.row_tokens or self.context.max_model_len)
        async with self._collecting(room) as collector:
            groups = await collector.collect(prompts, version)

        def build() -> tuple[TrainingBatch, RolloutRecord, bytes]:
            built = build_samples(
                groups,
                vocab_size=status.vocab_size,
                full_scores=bool(status.full_vocabulary_scores),
                row_tokens=status.row_tokens,
            )
            selection = select(built)
            batch = TrainingBatch.build(step, selection.samples)
            metrics = rollout_metrics(built, selection) | {"rollout/error_rate": collector.counts.error_rate}
            record = RolloutRecord(step, batch.content_hash.hex(), metrics)
            return batch, record, rollout_lines(built, selection, self.tokenizer)

        return await asyncio.to_thread(build)

    @asynccontextmanager
    async def _collecting(self, room: int) -> AsyncIterator[RolloutCollector]:
        """A collector whose requests are counted, however it ends; `room` as it says."""
        settings, attempts = self.settings, Attempts()
        try:
            yield RolloutCollector(
                fleet=self.fleet,
                tokenizer=self.tokenizer,
                vocab_size=self.context.status.vocab_size,
                room=room,
                concurrency=settings.max_concurrent_requests,
                attempts=settings.request_attempts,
                seconds=settings.request_timeout,
                environment_seconds=settings.environment_timeout,
                run_id=self.run_id,
                counts=attempts,
            )
        finally:
            self.progress.requests += attempts.total
            self.progress.failed_requests += attempts.failed

    async def _evaluate(self, step: int) -> dict[str, float]:
        """The metrics of what is evaluated after this step, with the weights that it gave."""
        due = [evaluation for evaluation in self.evaluations if evaluation.is_due(step)]
        if not due:
            return {}
        began, version = time.monotonic(), self.progress.weight_version
        assert version is not None, "weights are loaded before an evaluation"
        assert self.context.max_model_len is not None, "servers are inspected before an evaluation"
        self.progress.state = "eval"
        metrics: dict[str, float] = {}
        async with self._collecting(self.context.max_model_len) as collector:
            for evaluation in due:
                check_lengths(evaluation.prompts(step, self.tokenizer), self.context.max_model_len, None)
                metrics |= await evaluation.evaluate(step, self.tokenizer, collector, version)
        return {**metrics, "seconds/eval": time.monotonic() - began}

    async def _hand_in(
        self, step: int, batch: TrainingBatch, record: RolloutRecord, lines: bytes
    ) -> RolloutRecord:
        """Put the batch; returns the record of the one that the trainer holds: an accepted one wins."""
        self.records.write(record, lines)
        data = await asyncio.to_thread(encode, batch)
        try:
            await self.trainer.hand_in(step, data, seconds=self.settings.startup_timeout)
        except OtherBatchError as conflict:
            if conflict.content_hash is None:
                raise  # it wants another step
            known = self.records.find(step, conflict.content_hash)
            if known is None:
                raise OrchestratorError(
                    f"{conflict}; this run has no record of that batch: does another orchestrator drive this "
                    "trainer, or is output_dir not that of the run that it trained for?"
                ) from conflict
            log.warning(
                "step %d: the trainer holds a batch of before a restart; it is used, not the new one", step
            )
            record = known
        self.records.keep_only(step, record.content_hash)
        return record

    async def _finish(self, step: int, record: RolloutRecord | None, began: float) -> None:
        """Wait for the result of a step that was handed in, have its weights loaded, and write its row."""
        waited = time.monotonic()
        self.progress.state = "train"
        result = await self._result(step)
        train_seconds = time.monotonic() - waited
        self.progress.state = "weights"
        weights_seconds = await self._load_weights(result.weight_version)
        if record is None:
            log.warning("step %d: no record of its rollouts; its row stays missing", step)
            return
        row: dict[str, float | int] = {"step": step, **record.metrics}
        if self.context.status.unsafe_ignore_kept_tokens:
            row["unsafe/ignore_kept_tokens"] = 1.0
        row |= {"seconds/train": train_seconds, **result.metrics}
        row |= await self._evaluate(step)
        row["seconds/weights"] = weights_seconds
        row["seconds/step"] = time.monotonic() - began
        row["weight_version"] = result.weight_version
        self.rows.append(row)
        self.records.forget_through(step)
        self.progress.row = row
        log.info("%s", step_line(row, self.settings.steps))

    async def _result(self, step: int) -> StepResult:
        result = await self.trainer.result(
            step, seconds=self.settings.step_timeout, patience=self.settings.startup_timeout
        )
        if result.weight_version != step:
            raise PeerMismatchError(
                f"{self.trainer.name}: step {step} published weights version {result.weight_version}"
            )
        return result

    async def _load_weights(self, version: int) -> float:
        """Have all servers carry a version; returns the seconds that took."""
        began = time.monotonic()
        await self.fleet.load_weights(version)
        self.progress.weight_version = version
        return time.monotonic() - began


def step_line(row: dict[str, float | int], steps: int) -> str:
    """What is logged of a step."""
    shown = {"mismatch_kl/mean": "mismatch KL", "kept/coverage": "coverage"}
    parts = [f"step {row['step']}/{steps}", f"reward {row['reward/mean']:.3f}"]
    parts += [f"{label} {row[name]:.3g}" for name, label in shown.items() if name in row]
    parts.append(
        f"{row['seconds/step']:.1f} s (rollout {row['seconds/rollout']:.1f}, "
        f"train {row['seconds/train']:.1f}, weights {row['seconds/weights']:.1f})"
    )
    return ", ".join(parts)
