"""All inference servers together: who gets the next request, who carries which weights, who was lost."""

import asyncio
from collections.abc import Callable, Sequence

from .errors import PeerUnavailableError
from .inference import InferenceServer, InferenceStatus
from .peers import TransientError
from .together import together

Check = Callable[[InferenceServer, InferenceStatus], None]
"""Raises PeerMismatchError if a server cannot serve the run."""


class Fleet:
    """The inference servers of a run.

    A server whose connection fails is *lost*: it gets no requests until it is healthy again, has passed the
    same checks as at the start and carries the current weights, so that one that was killed and started again
    takes part as if nothing had happened.

    Args:
        servers: At least one.
        check: Called with each server's status, at the start and after each loss.
        startup_timeout: Seconds to wait for a server's health, at the start and after a loss.
        weights_timeout: Seconds to wait for a server to load weights.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        check: Check,
        *,
        startup_timeout: float,
        weights_timeout: float,
    ) -> None:
        if not servers:
            raise ValueError("orchestrator.inference_urls: none given; name at least one inference server")
        self.servers = list(servers)
        self._check = check
        self._startup_timeout = startup_timeout
        self._weights_timeout = weights_timeout
        self._version: int | None = None
        self._revivals: dict[InferenceServer, asyncio.Task[None]] = {}

    async def inspect(self) -> None:
        """Wait for every server's health and check what it says of itself.

        Raises:
            OrchestratorError: of the first server that fails, naming it.
        """
        await together([self._inspect(server) for server in self.servers])

    async def load_weights(self, version: int) -> None:
        """Have every server carry a version; one that already does is not asked.

        Raises:
            OrchestratorError: of the first server that fails, naming it.
        """
        await self._stop_revivals()
        self._version = version
        await together([self._load(server, version) for server in self.servers])

    async def pick(self, avoid: InferenceServer | None = None) -> InferenceServer:
        """The server with the fewest requests in flight, if possible another than `avoid`.

        Waits for a server to come back if all are lost.

        Raises:
            OrchestratorError: all are lost and none came back, or one came back unfit.
        """
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
                others = [server for server in able if server is not avoid]
                return min(others or able, key=lambda server: server.in_flight)
            waiting = [task for task in self._revivals.values() if not task.done()]
            if not waiting:
                raise next(iter(self._revivals.values())).exception() or AssertionError(
                    "lost without a revival"
                )
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def report_loss(self, server: InferenceServer) -> None:
        """No connection, or 503: no requests for this server until it is back."""
        if not server.lost:
            server.lost = True
            self._revivals[server] = asyncio.create_task(self._revive(server))

    async def close(self) -> None:
        """End what still waits for lost servers."""
        await self._stop_revivals()

    async def _revive(self, server: InferenceServer) -> None:
        await self._inspect(server)
        if self._version is not None:
            await self._load(server, self._version)
        server.lost = False

    async def _inspect(self, server: InferenceServer) -> InferenceStatus:
        await server.wait_healthy(self._startup_timeout)
        try:
            status = await server.status()
        except TransientError as error:
            raise PeerUnavailableError(str(error)) from error
        self._check(server, status)
        return status

    async def _load(self, server: InferenceServer, version: int) -> None:
        # Also where it says that it carries this version: it may be another run's, which only it can tell.
        await server.load_weights(version, seconds=self._weights_timeout)
        if server.lost:
            await self._inspect(server)
            server.lost = False

    async def _stop_revivals(self) -> None:
        tasks = list(self._revivals.values())
        self._revivals.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
