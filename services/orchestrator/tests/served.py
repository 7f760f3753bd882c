"""An ASGI app behind a real port, in a thread of its own; may be killed and started again there."""

import asyncio
import socket
import threading
import time
from typing import Any

import uvicorn

from keptset import ports


class Served:
    """Serves `app` from construction on."""

    def __init__(self, app: Any) -> None:
        self.app = app
        # to be listened on again after a kill: meanwhile no outgoing connection may be given it
        self.port = ports.pick("127.0.0.1", set())
        listener = socket.create_server(("127.0.0.1", self.port))
        self.url = f"http://127.0.0.1:{self.port}"
        self._serve(listener)

    def _serve(self, listener: socket.socket) -> None:
        config = uvicorn.Config(self.app, log_level="critical", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._until_killed(listener)), daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < deadline, "the fake did not start"
            time.sleep(0.005)

    async def _until_killed(self, listener: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[listener])

    def kill(self) -> None:
        """Close everything at once; whoever waits for an answer sees the connection go."""
        if not self.thread.is_alive():
            return
        self.server.force_exit = self.server.should_exit = True
        self.loop.call_soon_threadsafe(self._abort_connections)
        self.thread.join(60)
        assert not self.thread.is_alive()

    def _abort_connections(self) -> None:
        for listening in self.server.servers:
            listening.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()

    def revive(self) -> None:
        """Start again if it was killed."""
        if not self.thread.is_alive():
            self.start_again()

    def start_again(self) -> None:
        """Listen on the port of before."""
        self._serve(socket.create_server(("127.0.0.1", self.port)))
