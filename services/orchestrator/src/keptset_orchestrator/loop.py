"""The loop: sample, hand in, wait, update the weights, write the row; and how to go on after a crash.

Three strands go through the steps in order. One samples, at most `max_async_level` versions ahead of the
weights that the servers carry. One hands batches in; where rollouts may be ahead at all, that of the next
step while the trainer works on this one. One waits for results, has weights loaded and writes rows. At level
0 they take turns: every token is sampled with the weights that the step trains. If servers and trainer share
a GPU, the servers sleep from before the batch is handed in until its weights are loaded.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kept_tokens.messages import StepResult, TrainingBatch, encode
from keptset_settings import OrchestratorSettings

from .batches import build_samples
from .build import build_evaluations
from .errors import OrchestratorError, PeerMismatchError
from .evaluation import Evaluation
from .fleet import Fleet
from .metrics_file import MetricsFile
from .preflight import check_lengths, check_same_trainer
from .progress import Progress
from .rollout_files import RolloutFiles
from .rollout_lines import rollout_lines
from .selection import rollout_metrics, select
from .state import BatchRecord, RunState
from .step_sampler import Lengths, Sampled, StepSampler
from .together import first_of
from .tokenizer import ChatTokenizer
from .trainer import OtherBatchError, Trainer, TrainerStatus
from .watermark import Watermark

log = logging.getLogger(__name__)


class Loop:
    """The steps of a run.

    Args:
        settings: Resolved.
        progress: Is kept up to date.
        trainer: Who trains.
        status: What the trainer said of itself just now.
        fleet: Who samples.
        sampler: Samples a step.
        lengths: What sequences must fit; asked for at each step, as a server that comes back may be another.
        tokenizer: Of the policy.
        state: Of the run.
        output_dir: For rows and rollouts.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        progress: Progress,
        trainer: Trainer,
        status: TrainerStatus,
        fleet: Fleet,
        sampler: StepSampler,
        lengths: Callable[[], Lengths],
        tokenizer: ChatTokenizer,
        state: RunState,
        output_dir: Path,
    ) -> None:
        self.settings = settings
        self.progress = progress
        self.trainer = trainer
        self.status = status
        self.fleet = fleet
        self.sampler = sampler
        self.lengths = lengths
        self.tokenizer = tokenizer
        self.state = state
        self.evaluations: Sequence[Evaluation] = build_evaluations(settings)
        self.files = RolloutFiles(output_dir / "rollouts")
        self.rows = MetricsFile(output_dir / "metrics.jsonl", status.next_step)
        self.level = settings.max_async_level
        self.loaded = Watermark(-1)
        """The weights that the servers carry."""
        self.finished = Watermark(status.next_step - 1)
        """The last step with a row, or without any hope of one."""

    async def run(self) -> None:
        """All steps that are still to be done."""
        for evaluation in self.evaluations:  # what does not fit shows now, not after the first interval
            check_lengths(evaluation.prompts(0, self.tokenizer), self.lengths().context, None)
        accepted, trained = self.status.next_step - 1, self.status.weight_version
        unfinished = await self._unfinished(accepted)
        self.progress.step = accepted
        if not unfinished and accepted:
            await self._result(accepted)  # also says whether its weights are what they should be
        if unfinished:
            self.finished = Watermark(unfinished[0] - 1)
        if trained >= accepted - self.level:
            seconds = await self._load_weights(trained)
            log.info("weights version %d is in place (%.1f s)", trained, seconds)
        sampling: asyncio.Queue[asyncio.Task[Sampled]] = asyncio.Queue()
        handed_in: asyncio.Queue[BatchRecord] = asyncio.Queue()
        new = range(accepted + 1, self.settings.steps + 1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._finish_all(unfinished, trained, new, handed_in))
                group.create_task(self._hand_in_all(new, sampling, handed_in))
                for step in new:
                    await self.loaded.at_least(step - 1 - self.level)
                    if self.level == 0:  # evaluation and row of the step before come first
                        await self.finished.at_least(step - 1)
                    sampling.put_nowait(group.create_task(self.sampler.sample(step, self.lengths())))
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        if not new:
            log.info("all %d steps are done", self.settings.steps)

    async def _unfinished(self, accepted: int) -> list[int]:
        """The steps that an earlier orchestrator handed in and wrote no row of.

        An accepted batch wins: its step is not sampled again. Its row is completed from what was remembered
        before the batch was handed in.
        """
        await asyncio.to_thread(self.state.not_accepted, accepted + 1)
        last = max(self.rows.steps, default=0)
        lost = sorted(set(range(1, last)) - self.rows.steps)
        if lost:
            log.warning(
                "%s lacks rows %s, which cannot be completed: later ones are there", self.rows.path, lost
            )
        return list(range(last + 1, accepted + 1))

    async def _hand_in_all(
        self,
        steps: Sequence[int],
        sampling: "asyncio.Queue[asyncio.Task[Sampled]]",
        handed_in: "asyncio.Queue[BatchRecord]",
    ) -> None:
        """Build the batch of each step when its groups are there, and put it when it is its turn."""
        for step in steps:
            sampled = await (await sampling.get())
            began = time.monotonic()
            batch, record, lines = await asyncio.to_thread(self._build, step, sampled)
            record.metrics["seconds/rollout"] = sampled.seconds + time.monotonic() - began
            await self.finished.at_least(step - 1 - min(self.level, 1))
            if self.fleet.colocated:  # everything is sampled; the trainer comes with the batch
                record.metrics["seconds/sleep"] = await self.fleet.sleep()
            if self.settings.weights_transfer == "nccl":  # the trainer sends what it holds, between two steps
                await self.loaded.at_least(step - 1)
            handed_in.put_nowait(await self._hand_in(batch, record, lines, len(sampled.groups)))

    def _build(self, step: int, sampled: Sampled) -> tuple[TrainingBatch, BatchRecord, bytes]:
        """The batch of a step, what its row says of its rollouts, and the rollouts as lines."""
        built = build_samples(
            sampled.groups,
            vocab_size=self.status.vocab_size,
            full_scores=bool(self.status.full_vocabulary_scores),
            row_tokens=self.status.row_tokens,
        )
        selection = select(built)
        batch = TrainingBatch.build(step, selection.samples)
        metrics = rollout_metrics(built, selection, len(self.settings.train.source)) | sampled.metrics
        record = BatchRecord(step, batch.content_hash.hex(), metrics)
        return batch, record, rollout_lines(built, selection, self.tokenizer, sampled.room)

    async def _hand_in(
        self, batch: TrainingBatch, record: BatchRecord, lines: bytes, groups: int
    ) -> BatchRecord:
        """Put the batch; returns the record of the one that the trainer holds: an accepted one wins."""
        step = record.step
        await asyncio.to_thread(self.files.write, step, record.content_hash, lines)
        await asyncio.to_thread(self.state.add_batch, record, groups)
        data = await asyncio.to_thread(encode, batch)
        now = await self.trainer.status(seconds=self.settings.startup_timeout)
        check_same_trainer(self.trainer.name, self.status, now)
        try:
            settings = self.settings
            await self.trainer.hand_in(
                step, data, seconds=settings.startup_timeout, training=settings.step_timeout
            )
        except OtherBatchError as conflict:
            if conflict.content_hash is None:
                raise  # it wants another step
            known = await asyncio.to_thread(self.state.batch, step, conflict.content_hash)
            if known is None:
                raise OrchestratorError(
                    f"{conflict}; this run has no record of that batch: does another orchestrator drive this "
                    "trainer, or is output_dir not that of the run that it trained for?"
                ) from conflict
            log.warning(
                "step %d: the trainer holds a batch of before a restart; it is used, not the new one", step
            )
            record = known
        await self._accepted(record)
        return record

    async def _accepted(self, record: BatchRecord) -> None:
        await asyncio.to_thread(self.state.accept, record.step, record.content_hash)
        await asyncio.to_thread(self.files.keep_only, record.step, record.content_hash)

    async def _finish_all(
        self,
        unfinished: Sequence[int],
        trained: int,
        new: Sequence[int],
        handed_in: "asyncio.Queue[BatchRecord]",
    ) -> None:
        """The rows of all steps: first of those that were handed in before a restart."""
        for step in unfinished:
            record = await asyncio.to_thread(self.state.batch, step)
            log.info("step %d was handed in before; waiting for the trainer", step)
            if record is None:
                log.warning("step %d: no record of its rollouts; its row stays missing", step)
            else:
                await self._accepted(record)
            sampling = record.metrics["seconds/rollout"] if record else 0.0
            self.progress.step = step
            await self._finish(step, record, time.monotonic() - sampling, superseded=step < trained)
        for step in new:
            began = time.monotonic()
            self.progress.step = step
            self.progress.state = "rollout"
            await self._finish(step, await handed_in.get(), began)

    async def _finish(
        self, step: int, record: BatchRecord | None, began: float, superseded: bool = False
    ) -> None:
        """Wait for the result of a step that was handed in, have its weights loaded, and write its row.

        `superseded`: weights of a later step are published, and perhaps in place; these may be gone.
        """
        waited = time.monotonic()
        self.progress.state = "train"
        result = await self._result(step)
        train_seconds = time.monotonic() - waited
        self.progress.state = "weights"
        weights_seconds = 0.0 if superseded else await self._load_weights(result.weight_version)
        if record is not None:
            row: dict[str, float | int] = {"step": step, **record.metrics}
            if self.status.unsafe_ignore_kept_tokens:
                row["unsafe/ignore_kept_tokens"] = 1.0
            row |= {"seconds/train": train_seconds, **result.metrics}
            row |= await self._evaluate(step, superseded)
            row["seconds/weights"] = weights_seconds
            row["seconds/weights_pause"] = max(server.pause_seconds for server in self.fleet.servers)
            if self.fleet.colocated:
                row["seconds/wake"] = max(server.wake_seconds for server in self.fleet.servers)
            row["seconds/step"] = time.monotonic() - began
            row["weight_version"] = result.weight_version
            await asyncio.to_thread(self.rows.append, row)
            self.progress.row = row
            log.info("%s", step_line(row, self.settings.steps))
        await asyncio.to_thread(self.state.finish, step, result.weight_version)
        self.finished.rise(step)

    async def _evaluate(self, step: int, superseded: bool) -> dict[str, float]:
        """The metrics of what is evaluated after this step, with the weights that it gave."""
        due = [evaluation for evaluation in self.evaluations if evaluation.is_due(step)]
        if not due:
            return {}
        if superseded:
            log.warning("step %d: its evaluation is left out: later weights are in place already", step)
            return {}
        began, lengths = time.monotonic(), self.lengths()
        self.progress.state = "eval"
        metrics: dict[str, float] = {}
        async with self.sampler.collecting(step, lengths.context) as collector:
            for evaluation in due:
                check_lengths(evaluation.prompts(step, self.tokenizer), lengths.context, None)
                metrics |= await evaluation.evaluate(step, self.tokenizer, collector)
        return {**metrics, "seconds/eval": time.monotonic() - began}

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
        """Have all servers carry a version, awake; returns the seconds that took."""
        if self.loaded.value == version and not self.fleet.asleep:
            return 0.0
        began = time.monotonic()
        await self.fleet.load_weights(version)
        self.progress.weight_version = version
        self.loaded.rise(version)
        return time.monotonic() - began


def step_line(row: dict[str, float | int], steps: int) -> str:
    """What is logged of a step."""
    shown = {"mismatch_kl/mean": "mismatch KL", "kept/coverage": "coverage", "staleness/mean": "staleness"}
    parts = [f"step {row['step']}/{steps}", f"reward {row['reward/mean']:.3f}"]
    parts += [f"{label} {row[name]:.3g}" for name, label in shown.items() if name in row]
    parts.append(
        f"{row['seconds/step']:.1f} s (rollout {row['seconds/rollout']:.1f}, "
        f"train {row['seconds/train']:.1f}, weights {row['seconds/weights']:.1f})"
    )
    return ", ".join(parts)
