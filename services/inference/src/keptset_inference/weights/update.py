"""Putting a version into the running engine: checked first, then as short a pause as possible, never
half-loaded.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm.logger import init_logger

from kept_tokens.versions import BASE, version_name

from ..broken import break_server
from ..errors import RequestError
from ..state import ServerState
from .lease import Lease
from .pauses import FrozenRequests, Pause
from .published import check_published, manifest_bytes
from .running_model import RunningModel
from .transfer import Transfer, check_transfer

logger = init_logger("vllm.keptset.weights")

WORKERS_GRACE = 30.0
"""Seconds beyond their own bound in which workers that wait for a trainer answer, or have ended."""


class Engine(Protocol):
    """What an update needs of vLLM's engine client."""

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...

    async def ask_workers(self, method: str, kwargs: dict[str, Any]) -> list[Any]: ...

    async def update_weight_version(self, new_version: str) -> None: ...

    async def resume_generation(self) -> None: ...


@dataclass(frozen=True)
class UpdateResult:
    """What an update took."""

    version: int
    seconds: float
    """All of it, checking the files included."""
    pause_seconds: float
    """How long nothing was sampled."""


class WorkersFailed(RuntimeError):
    """What workers say of a call that failed."""


class WeightUpdates:
    """One update at a time."""

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        root: Path | None,
        model: RunningModel | str,
        load_timeout: float,
    ) -> None:
        """`model` is a text if updates are impossible: why."""
        self.engine, self.state, self.root, self.model = engine, state, root, model
        self.load_timeout = load_timeout
        self._group: str | None = None
        """The NCCL group that the workers are in."""
        self._current: Path | None = model.directory if isinstance(model, RunningModel) else None
        self._content: bytes | None = None
        """What the manifest of the version that runs said."""
        self._running: tuple[int, bool, asyncio.Task[UpdateResult]] | None = None
        """The version, whether it comes over NCCL, and the update."""

    async def update(
        self, version: int, transfer: Transfer | None = None, pause: Pause | None = None
    ) -> UpdateResult:
        """Load a version, or receive it if there is a `transfer`. Of files, the one that is loaded already is
        nothing to do, unless its manifest changed: a trainer that was started anew publishes its own version
        0.

        Args:
            version: n of v{n:06d}.
            transfer: It comes over NCCL; called off if this is cancelled.
            pause: What is around a load from files; None: running requests are frozen.

        Raises:
            RequestError: 404, 409 or 422 and nothing was touched; 500 or 504 and the previous version runs
                again; 503 and the server is broken.
        """
        if pause is None:
            self._require_awake(version)
            pause = FrozenRequests(self.engine)
        if transfer is not None and not self.state.facts.takes_transfers:
            raise RequestError(
                'this server takes no weights over NCCL: set weights.transfer = "nccl" for all services',
                409,
                "no_transfer",
            )
        if self.root is None and transfer is None:
            raise RequestError(
                "this server has no weights_dir: set inference.weights_dir to the directory that versions "
                "are published in",
                404,
                "no_weights_dir",
            )
        if isinstance(self.model, str):
            raise RequestError(self.model, 409, "no_updates")
        lease = None
        if self._running is not None:
            loading, received, task = self._running
            if loading != version or received or transfer is not None:
                raise RequestError(
                    f"version {loading} is being {'received' if received else 'loaded'}; ask for version "
                    f"{version} when that is done",
                    409,
                    "update_running",
                )
        else:
            if transfer is not None:
                check_transfer(version, transfer, self.model)
                lease = Lease()
                task = asyncio.create_task(self._receive(version, transfer, lease))
            elif version == self.state.weight_version and self.root is not None:
                content = await asyncio.to_thread(manifest_bytes, self.root, version)
                if content is None or content == self._content:
                    return UpdateResult(version, 0.0, 0.0)
                logger.warning("weights: version %d was published anew, with other weights", version)
                task = asyncio.create_task(self._update(version, self.root, self.model, pause))
            else:
                assert self.root is not None
                task = asyncio.create_task(self._update(version, self.root, self.model, pause))
            self._running = (version, transfer is not None, task)
            task.add_done_callback(self._finished)
        try:
            # Whoever asks may leave; a load goes on. A transfer is nothing without the others of its group.
            return await asyncio.shield(task)
        finally:
            if lease is not None:
                lease.end()

    def _require_awake(self, version: int) -> None:
        if self.state.phase != "awake":
            raise RequestError(
                f"the engine is {self.state.phase}: it takes weights as it wakes, with "
                f'POST /keptset/v1/wake {{"version": {version}}}',
                409,
                "asleep",
            )

    async def idle(self) -> None:
        """Return when no update runs."""
        while self._running is not None:
            await asyncio.wait({self._running[2]})

    def _finished(self, task: asyncio.Task[UpdateResult]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("weights: %s", error)

    async def _update(self, version: int, root: Path, model: RunningModel, pause: Pause) -> UpdateResult:
        start = time.monotonic()
        name = version_name(version)
        try:
            async with asyncio.timeout(self.load_timeout):
                content = await asyncio.to_thread(manifest_bytes, root, version)
                directory = await asyncio.to_thread(
                    check_published, root, version, model.shapes, tied=model.tied
                )
        except TimeoutError:
            raise self._too_long(f"the files of {root / name} to be read and hashed", 504) from None
        if isinstance(pause, FrozenRequests):
            self._require_awake(version)  # still
        paused = time.monotonic()
        await self._load(directory, name, pause)
        self.state.weight_version = version
        self._current, self._content = directory, content
        result = UpdateResult(version, time.monotonic() - start, time.monotonic() - paused)
        logger.info(
            "weights: %s in %.2f s, of which %.2f s paused", name, result.seconds, result.pause_seconds
        )
        return result

    async def _receive(self, version: int, transfer: Transfer, lease: Lease) -> UpdateResult:
        """From the trainer, which is asked to send at the same time. Once a weight may have come nothing is
        sampled until all weights are those of one version: the previous one is loaded from its files.
        """
        start = time.monotonic()
        seconds = min(self.load_timeout, transfer.seconds)

        async def ask(method: str, **kwargs: Any) -> None:
            left = max(0.0, start + seconds - time.monotonic())
            await self._ask(method, **kwargs, lease=lease.name, seconds=left)

        waiting_for, touched, loaded = "the trainer to join the workers' group", False, False
        frozen = FrozenRequests(self.engine)
        try:
            # Workers give up by themselves; this is for those that cannot.
            async with asyncio.timeout(seconds + WORKERS_GRACE):
                if self._group != transfer.unique_id:
                    self._group = None
                    await ask("keptset_join", init_info=transfer.init_info())
                    self._group = transfer.unique_id
                waiting_for = frozen.waiting_for
                paused = time.monotonic()
                await frozen.begin()
                waiting_for, touched = f"the trainer to send version {version}", True
                await ask("keptset_receive", update_info=transfer.update_info())
                waiting_for, loaded = "the engine to take the version's name and resume", True
                await self.engine.update_weight_version(version_name(version))
                await frozen.end()
        except Exception as error:
            self._group = None
            late = isinstance(error, TimeoutError)
            said = f"no answer within {seconds + WORKERS_GRACE:g} s" if late else error
            failure = RequestError(
                f"receiving version {version} failed while waiting for {waiting_for}: {said}",
                504 if late else 500,
                "load_failed",
            )
            if loaded or (late and waiting_for != frozen.waiting_for):  # workers that still wait take no call
                raise await self._break(failure) from error
            raise await (self._go_back if touched else self._undo)(failure, frozen) from error
        self.state.weight_version = version
        # What a later load from files goes back to if it fails; the same weights, if they are published here.
        directory = None if self.root is None else self.root / version_name(version)
        self._current = directory if directory is not None and directory.is_dir() else None
        self._content = None if self.root is None else manifest_bytes(self.root, version)
        result = UpdateResult(version, time.monotonic() - start, time.monotonic() - paused)
        logger.info(
            "weights: %s over NCCL in %.2f s, of which %.2f s paused",
            version_name(version),
            result.seconds,
            result.pause_seconds,
        )
        return result

    async def _load(self, directory: Path, name: str, pause: Pause) -> None:
        waiting_for = ""
        touched = loaded = False
        try:
            async with asyncio.timeout(self.load_timeout):
                await pause.begin()
                touched = True
                waiting_for = f"every worker to load {directory}"
                await self._ask("keptset_reload", weights_path=str(directory))
                loaded = True
                waiting_for = "the engine to take the version's name and resume"
                await self.engine.update_weight_version(name)
                await pause.end()
        except TimeoutError:
            if not touched:
                raise await self._undo(self._too_long(pause.waiting_for, 504), pause) from None
            # A worker that still loads cannot be asked to load something else.
            raise await self._break(self._too_long(waiting_for, 503)) from None
        except Exception as error:
            failure = RequestError(
                f"loading {name} failed while waiting for {waiting_for or pause.waiting_for}: {error}",
                500,
                "load_failed",
            )
            if loaded:
                raise await self._break(failure) from error
            if not touched:
                raise await self._undo(failure, pause) from error
            raise await self._go_back(failure, pause) from error

    async def _ask(self, method: str, **kwargs: Any) -> None:
        """Of all workers, see `worker`.

        Raises:
            WorkersFailed: one could not do it.
        """
        answers = await self.engine.ask_workers(method, kwargs)
        failures = dict.fromkeys(answer for answer in answers if answer is not None)
        if failures:
            raise WorkersFailed("; ".join(failures))

    async def _undo(self, failure: RequestError, pause: Pause) -> RequestError:
        """No weight was touched: go on with the ones that are there."""
        try:
            async with asyncio.timeout(self.load_timeout):
                await pause.undo()
        except Exception as error:
            return await self._break(
                RequestError(f"{failure}; then resuming failed: {error!r}", 503, "broken")
            )
        return failure

    async def _go_back(self, failure: RequestError, pause: Pause) -> RequestError:
        """A failed load may leave a mixture: load the previous weights again before anything is sampled."""
        if self._current is None:
            return await self._break(failure)
        version = self.state.weight_version
        name = BASE if version is None else version_name(version)
        try:
            async with asyncio.timeout(self.load_timeout):
                await self._ask("keptset_reload", weights_path=str(self._current))
                await self.engine.update_weight_version(name)
                await pause.end()
        except Exception as error:
            return await self._break(
                RequestError(f"{failure}; then loading {name} again failed: {error!r}", 503, "broken")
            )
        return RequestError(f"{failure}; {name} runs again", 500, "load_failed")

    async def _break(self, failure: RequestError) -> RequestError:
        """Answer nothing any more: which weights are loaded is unknown."""
        return await break_server(self.engine, self.state, f"{failure}; which weights are loaded is unknown")

    def _too_long(self, waiting_for: str, status: int) -> RequestError:
        return RequestError(
            f"gave up after {self.load_timeout:g} s (inference.load_timeout) of waiting for {waiting_for}",
            status,
            "load_timeout",
        )


__all__ = ["UpdateResult", "WeightUpdates"]
