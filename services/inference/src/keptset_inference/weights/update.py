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

from ..errors import RequestError
from ..state import ServerState
from .published import check_published, manifest_bytes
from .running_model import RunningModel

logger = init_logger("vllm.keptset.weights")


class Engine(Protocol):
    """What an update needs of vLLM's engine client."""

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any: ...

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
        self._current = model.directory if isinstance(model, RunningModel) else None
        self._content: bytes | None = None
        """What the manifest of the version that runs said."""
        self._running: tuple[int, asyncio.Task[UpdateResult]] | None = None

    async def update(self, version: int) -> UpdateResult:
        """Load a version; the one that is loaded already is nothing to do, unless its manifest changed: a
        trainer that was started anew publishes its own version 0.

        Raises:
            RequestError: 404, 409 or 422 and nothing was touched; 500 or 504 and the previous version runs
                again; 503 and the server is broken.
        """
        if self.root is None:
            raise RequestError(
                "this server has no weights_dir: set inference.weights_dir to the directory that versions "
                "are published in",
                404,
                "no_weights_dir",
            )
        if isinstance(self.model, str):
            raise RequestError(self.model, 409, "no_updates")
        if self._running is not None:
            loading, task = self._running
            if loading != version:
                raise RequestError(
                    f"version {loading} is being loaded; ask for version {version} when that is done",
                    409,
                    "update_running",
                )
        else:
            if version == self.state.weight_version:
                content = await asyncio.to_thread(manifest_bytes, self.root, version)
                if content is None or content == self._content:
                    return UpdateResult(version, 0.0, 0.0)
                logger.warning("weights: version %d was published anew, with other weights", version)
            task = asyncio.create_task(self._update(version, self.root, self.model))
            self._running = (version, task)
            task.add_done_callback(self._finished)
        # Whoever asks may leave; the update goes on.
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[UpdateResult]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("weights: %s", error)

    async def _update(self, version: int, root: Path, model: RunningModel) -> UpdateResult:
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
        paused = time.monotonic()
        await self._load(directory, name)
        self.state.weight_version = version
        self._current, self._content = directory, content
        result = UpdateResult(version, time.monotonic() - start, time.monotonic() - paused)
        logger.info(
            "weights: %s in %.2f s, of which %.2f s paused", name, result.seconds, result.pause_seconds
        )
        return result

    async def _load(self, directory: Path, name: str) -> None:
        waiting_for = "the engine to pause"
        touched = loaded = False
        try:
            async with asyncio.timeout(self.load_timeout):
                # Running requests are put back into the queue and computed anew under the new weights.
                await self.engine.pause_generation(mode="keep", clear_cache=True)
                touched = True
                waiting_for = f"every worker to load {directory}"
                await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
                loaded = True
                waiting_for = "the engine to take the version's name and resume"
                await self.engine.update_weight_version(name)
                await self.engine.resume_generation()
        except TimeoutError:
            if not touched:
                raise await self._resume(self._too_long(waiting_for, 504)) from None
            # A worker that still loads cannot be asked to load something else.
            raise await self._break(self._too_long(waiting_for, 503)) from None
        except Exception as error:
            failure = RequestError(
                f"loading {name} failed while waiting for {waiting_for}: {error}", 500, "load_failed"
            )
            if loaded:
                raise await self._break(failure) from error
            raise await self._go_back(failure) from error

    async def _resume(self, failure: RequestError) -> RequestError:
        """No weight was touched: go on with the ones that are there."""
        try:
            async with asyncio.timeout(self.load_timeout):
                await self.engine.resume_generation()
        except Exception as error:
            return await self._break(
                RequestError(f"{failure}; then resuming failed: {error!r}", 503, "broken")
            )
        return failure

    async def _go_back(self, failure: RequestError) -> RequestError:
        """A failed load may leave a mixture: load the previous weights again before anything is sampled."""
        assert self._current is not None
        version = self.state.weight_version
        name = BASE if version is None else version_name(version)
        try:
            async with asyncio.timeout(self.load_timeout):
                await self.engine.collective_rpc(
                    "reload_weights", kwargs={"weights_path": str(self._current)}
                )
                await self.engine.update_weight_version(name)
                await self.engine.resume_generation()
        except Exception as error:
            return await self._break(
                RequestError(f"{failure}; then loading {name} again failed: {error!r}", 503, "broken")
            )
        return RequestError(f"{failure}; {name} runs again", 500, "load_failed")

    async def _break(self, failure: RequestError) -> RequestError:
        """Answer nothing any more: which weights are loaded is unknown."""
        self.state.broken = f"{failure}; which weights are loaded is unknown: restart the server"
        try:
            async with asyncio.timeout(10):
                await self.engine.pause_generation(mode="abort", clear_cache=True)
        except Exception as error:
            logger.error("weights: the requests that were running could not be aborted: %r", error)
        return RequestError(self.state.broken, 503, "broken")

    def _too_long(self, waiting_for: str, status: int) -> RequestError:
        return RequestError(
            f"gave up after {self.load_timeout:g} s (inference.load_timeout) of waiting for {waiting_for}",
            status,
            "load_timeout",
        )


__all__ = ["UpdateResult", "WeightUpdates"]
