"""All inference servers together: who gets the next request, who carries which weights, who was lost."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from .errors import (
    OtherVersionError,
    PeerMismatchError,
    PeerRefusedError,
    PeerUnavailableError,
    TransferFailedError,
)
from .inference import InferenceServer, InferenceStatus
from .peers import TransientError
from .router import Routed, Router
from .together import together
from .weight_transfer import WeightTransfer

log = logging.getLogger(__name__)

Check = Callable[[InferenceServer, InferenceStatus], None]
"""Raises PeerMismatchError if a server cannot serve the run."""

PAUSE = 0.5
"""Seconds before a server that was lost again is looked for again."""

AFFINITY_SLACK = 4
"""So many more requests than the least loaded server may have one that has seen the prefix."""


class Fleet:
    """The inference servers of a run.

    A server whose connection fails is *lost*: its requests go to the others, and it gets none until it is
    healthy again, has passed the same checks as at the start and carries the current weights, so that one
    that was killed and started again takes part as if nothing had happened. It is looked for as long as
    others are there, and for `startup_timeout` once none is.

    With a router, that chooses the server of a rollout's request, and is told which servers are not lost.

    Args:
        servers: At least one.
        check: Called with each server's status, at the start and after each loss.
        startup_timeout: Seconds to wait for a server's health, at the start and after a loss.
        weights_timeout: Seconds to wait for a server to load weights.
        transfer: Has them sent from GPU to GPU, if the trainer still has them; None: servers read files.
        router: Stands before the servers; None: they are asked themselves.
        colocated: They share their GPUs with the trainer: they sleep until weights are loaded, and whenever
            they are put to `sleep`.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        check: Check,
        *,
        startup_timeout: float,
        weights_timeout: float,
        transfer: WeightTransfer | None = None,
        router: Router | None = None,
        colocated: bool = False,
    ) -> None:
        if not servers:
            raise ValueError("orchestrator.inference_urls: none given; name at least one inference server")
        self.servers = list(servers)
        self.version: int | None = None
        """That all are to carry; the newest that any of them may carry."""
        self.colocated = colocated
        self._awake = asyncio.Event()
        """Servers may be on their GPUs."""
        if not colocated:
            self._awake.set()
        self._check = check
        self._startup_timeout = startup_timeout
        self._transfer = transfer
        self._in_vain = 0
        """Transfers in a row that failed though nobody was lost."""
        self._router = router
        self._weights_timeout = weights_timeout
        self._revivals: dict[InferenceServer, asyncio.Task[None]] = {}
        self._homes: dict[str, InferenceServer] = {}
        self._look: asyncio.Task[None] | None = None
        self._goodbyes: set[asyncio.Task[None]] = set()

    async def inspect(self) -> None:
        """Wait for every server's health and check what it says of itself; then the router's, if any.

        Raises:
            OrchestratorError: of the first server that fails, naming it.
        """
        await together([self._inspect(server) for server in self.servers])
        await self._tell_router()

    @property
    def asleep(self) -> bool:
        """The trainer may be on their GPUs."""
        return not self._awake.is_set()

    async def sleep(self) -> float:
        """Have every server leave its GPU; the seconds that took. No request may be running.

        Raises:
            OrchestratorError: of the first server that stays there, naming it.
        """
        assert self.colocated
        began = time.monotonic()
        self._awake.clear()
        # Also those that are lost: they may be there all the same.
        await together([self._leave_gpu(server) for server in self.servers])
        return time.monotonic() - began

    async def load_weights(self, version: int) -> None:
        """Have every server carry a version, and at least one before this returns; a lost one gets it when it
        is back. Requests that are running go on, and from some token on under the new weights. Servers that
        sleep wake.

        Raises:
            OrchestratorError: of the first server that refuses, or if none is left, naming it.
        """
        self.version = version
        self._awake.set()
        able = [server for server in self.servers if not server.lost]
        if not able or not await self._transferred(version, able):
            able = [server for server in able if not server.lost]
            await together([self._update(server, version) for server in able])
        for server in able:
            if not server.lost and server.loaded_by != server.instance:
                log.warning("%s loaded version %d as another than before", server.name, version)
                self._lose(server)
        await self._some_able()

    async def sampler(
        self, avoid: InferenceServer | Routed | None = None, prefix: str | None = None
    ) -> InferenceServer | Routed:
        """Whom to ask for a rollout: the router if there is one, else as `pick`."""
        if self._router is None:
            return await self.pick(avoid, prefix)
        return Routed(self._router, await self._some_able(), prefix or "")

    async def pick(
        self, avoid: InferenceServer | Routed | None = None, prefix: str | None = None
    ) -> InferenceServer:
        """The server with the fewest requests in flight, if possible another than `avoid`.

        Waits for a server to come back if all are lost.

        Args:
            avoid: That the last attempt failed at.
            prefix: Requests of this name begin alike: they go where the first one went, which has the prefix
                in its cache, while that has at most AFFINITY_SLACK requests more than the least loaded.

        Raises:
            OrchestratorError: all are lost and none came back, or one came back unfit.
        """
        able = await self._some_able()
        others = [server for server in able if server is not avoid] or able
        best = min(others, key=lambda server: server.in_flight)
        if prefix is None:
            return best
        home = self._homes.get(prefix)
        if home in others and home.in_flight <= best.in_flight + AFFINITY_SLACK:
            return home
        self._homes[prefix] = best
        return best

    def forget(self, prefix: str) -> None:
        """No more requests of this prefix will come."""
        self._homes.pop(prefix, None)
        if self._router is not None:
            task = asyncio.create_task(self._say_goodbye(self._router, prefix))
            self._goodbyes.add(task)
            task.add_done_callback(self._goodbyes.discard)

    async def note_failure(self, at: InferenceServer | Routed, error: TransientError) -> None:
        """An attempt at somebody has failed: whoever is lost gets no requests until it is back.

        Raises:
            OrchestratorError: the router did not come back.
        """
        if isinstance(at, Routed):  # that does not say at whom
            await self._look_for_losses()
        elif error.lost:
            self._lose(at)

    async def was_started_again(self, at: InferenceServer | Routed, starts: int) -> bool:
        """Whether that is why an answer has tokens of other weights than its server was made to load.

        Args:
            at: Who answered.
            starts: Its count of starts when it was asked.
        """
        if isinstance(at, Routed):
            await self._look_for_losses()
        elif at.starts == starts and not at.lost:
            await self._look_at(at)
        return at.lost or at.starts != starts

    async def close(self) -> None:
        """End what still waits for lost servers, or for the router."""
        tasks = [*self._revivals.values(), *self._goodbyes, *([] if self._look is None else [self._look])]
        self._revivals.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _lose(self, server: InferenceServer) -> None:
        if not server.lost:
            server.lost = True
            log.warning("%s is lost; it is looked for", server.name)
            self._revivals[server] = asyncio.create_task(self._revive(server))

    async def _look_for_losses(self) -> None:
        """Ask all servers, once for all whose requests failed meanwhile, and tell the router of the able."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_at_all())
        await asyncio.shield(self._look)

    async def _look_at_all(self) -> None:
        await together([self._look_at(server) for server in self.servers if not server.lost])
        await self._tell_router()

    async def _look_at(self, server: InferenceServer, *, silence_is_loss: bool = False) -> None:
        """It is lost if it cannot be reached, stops or is broken, was started again, or carries other weights
        than it should; and if it does not answer, should that be loss enough.
        """
        before = server.version
        try:
            status = await server.status()
        except TransientError as error:
            if error.lost or silence_is_loss:
                self._lose(server)
            return
        carries = status.weight_version
        if status.stopping or status.broken is not None:
            log.warning("%s %s", server.name, "stops" if status.stopping else f"is broken: {status.broken}")
            self._lose(server)
        elif status.instance != server.instance or carries not in (before, server.version, self.version):
            log.warning("%s was started again, and carries weights version %s", server.name, carries)
            self._lose(server)

    async def _tell_router(self) -> None:
        if self._router is not None:
            await self._router.wait_healthy(self._startup_timeout)
            able = [server for server in self.servers if not server.lost]
            left_out = await self._router.send_to(able, self.servers)
            if left_out and len(left_out) == len(able):
                raise PeerUnavailableError(f"{self._router.name} takes none of the inference servers")
            for server in left_out:
                self._lose(server)

    async def _say_goodbye(self, router: Router, session: str) -> None:
        try:
            await router.finish(session)
        except (TransientError, PeerRefusedError) as error:
            log.debug("%s; its count of sessions is off", error)

    async def _some_able(self) -> list[InferenceServer]:
        """The servers that are not lost, at least one; waits for one if need be."""
        while True:
            for server, task in list(self._revivals.items()):
                if task.done():
                    error = task.exception()
                    if error is None:
                        del self._revivals[server]
                    elif not isinstance(error, PeerUnavailableError):
                        raise error
            able = [server for server in self.servers if not server.lost]
            if able:
                return able
            waiting = [task for task in self._revivals.values() if not task.done()]
            if not waiting:
                raise next(iter(self._revivals.values())).exception() or AssertionError(
                    "lost without a revival"
                )
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def _revive(self, server: InferenceServer) -> None:
        """Until it is back. Without another server that is bounded: it must become healthy in time, and may
        be lost again while it loads weights, but not for ever.
        """
        patience = time.monotonic() + self._startup_timeout + self._weights_timeout
        while True:
            trainers_turn = self.asleep  # no server can start meanwhile
            try:
                await self._tell_router()
                await self._inspect(server)
                if self.asleep:
                    await self._leave_gpu(server)
                    await self._awake.wait()  # a step is bounded by those who wait for it
                    patience = time.monotonic() + self._startup_timeout + self._weights_timeout
                if await self._carries(server):
                    break
                lost_again = f"{server.name} was lost again while it loaded weights"
                if time.monotonic() > patience and self._none_able():
                    raise PeerUnavailableError(lost_again)
                log.warning("%s", lost_again)
                await asyncio.sleep(PAUSE)
            except PeerUnavailableError as error:
                if self._none_able() and not trainers_turn:
                    raise
                log.warning("%s; it is looked for again", error)
                await asyncio.sleep(PAUSE)
        server.lost = False  # at once: an update that comes now is for it as well
        log.info("%s is back with weights version %s", server.name, server.version)
        await self._tell_router()

    async def _carries(self, server: InferenceServer) -> bool:
        """Have it load the current version, also if that changes meanwhile; False: lost again."""
        server.version = None
        while self.version is not None and server.version != self.version:
            try:
                await server.load_weights(self.version, seconds=self._weights_timeout, wake=self.colocated)
            except TransientError:
                return False
            if server.loaded_by != server.instance:
                return False
            if self.asleep:  # the others were put to sleep meanwhile
                await self._leave_gpu(server)
                await self._awake.wait()
                server.version = None
        return True

    def _none_able(self) -> bool:
        return all(server.lost for server in self.servers)

    async def _inspect(self, server: InferenceServer) -> InferenceStatus:
        await server.wait_healthy(self._startup_timeout)
        try:
            status = await server.status()
        except TransientError as error:
            raise PeerUnavailableError(str(error)) from error
        self._check(server, status)
        if self._transfer is not None and not status.takes_transfers:
            raise PeerMismatchError(
                f'{server.name} takes no weights over NCCL: set weights.transfer = "nccl" for it too, or '
                '"files" for all'
            )
        server.workers, server.instance = status.workers, status.instance
        server.starts += 1
        return status

    async def _transferred(self, version: int, servers: Sequence[InferenceServer]) -> bool:
        """Have them be sent a version; False: those that are not lost are to read its files."""
        if self._transfer is None:
            return False
        try:
            await self._transfer.update(version, servers)
        except OtherVersionError as error:
            log.warning("%s; the files of version %d are loaded instead", error, version)
            return False
        except TransferFailedError as error:
            await together([self._look_at(server, silence_is_loss=True) for server in servers])
            if not error.trainer_lost and not any(server.lost for server in servers):
                self._in_vain += 1
                if self._in_vain > 1:  # everybody was there, both times: nothing that passes
                    raise
            log.warning("%s; the files of version %d are loaded instead", error, version)
            return False
        self._in_vain = 0
        return True

    async def _update(self, server: InferenceServer, version: int) -> None:
        # Also where it says that it carries this version: it may be another run's, which only it can tell.
        try:
            await server.load_weights(version, seconds=self._weights_timeout, wake=self.colocated)
        except TransientError:
            self._lose(server)

    async def _leave_gpu(self, server: InferenceServer) -> None:
        try:
            await server.sleep(seconds=self._weights_timeout)
        except TransientError:  # it is gone; one that comes back starts asleep
            self._lose(server)
