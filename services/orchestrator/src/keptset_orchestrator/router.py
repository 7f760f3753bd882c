"""A vllm-router that stands before the inference servers: what it is told, and rollouts by way of it.

It chooses the server of each request by its own policy; which servers there are to choose from it is told
by us, as it would send requests to one that is healthy again before that carries the right weights.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

import httpx
import msgspec

from kept_tokens.answers import GenerateAnswer

from .errors import PeerMismatchError, PeerUnavailableError
from .inference import InferenceServer, generated
from .peers import HEALTH_SECONDS, Peer, TransientError, bearer

log = logging.getLogger(__name__)

TAKE_SECONDS = 10.0
"""For the router to take a server: it looks at the server's health first."""


class Router(Peer):
    """The router; `api_key` is that of the inference servers, which it passes on."""

    health_path = "/liveness"  # its /health is that of its servers

    def __init__(self, url: str, client: httpx.AsyncClient, api_key: str | None = None) -> None:
        super().__init__("router", url, client, bearer(api_key))
        self._telling = asyncio.Lock()

    async def send_to(
        self, servers: Sequence[InferenceServer], ours: Sequence[InferenceServer]
    ) -> list[InferenceServer]:
        """Have it choose among `servers`, and no others of `ours`; those that it did not take.

        Raises:
            PeerMismatchError: it is no router, or knows a server that is none of ours.
            PeerUnavailableError: it could not be told.
        """
        wanted = {server.url: server for server in servers}
        async with self._telling:
            try:
                known = await self._known()
                strangers = known - {server.url for server in ours}
                if strangers:
                    raise PeerMismatchError(
                        f"{self.name} sends requests to {', '.join(sorted(strangers))}, where nobody would "
                        "load weights: name that in orchestrator.inference_urls, spelt alike, or start the "
                        "router without it"
                    )
                for url in sorted(known - wanted.keys()):
                    await self._tell("remove_worker", url)
                return [wanted[url] for url in sorted(wanted.keys() - known) if not await self._take(url)]
            except TransientError as error:
                raise PeerUnavailableError(str(error)) from error

    async def generate(
        self, body: dict[str, Any], session: str, *, seconds: float, what: str
    ) -> GenerateAnswer:
        """As `InferenceServer.generate`; requests of a session go to one server, if the policy heeds it."""
        return await generated(self, body, seconds=seconds, what=what, headers={"X-Session-ID": session})

    async def finish(self, session: str) -> None:
        """No more requests of a session will come: policies that count sessions forget it.

        Raises:
            TransientError, PeerRefusedError: as `Peer.call`.
        """
        await self.call(
            "POST", "/finish_session", seconds=HEALTH_SECONDS, what="finish", params={"session_id": session}
        )

    async def _known(self) -> set[str]:
        response = await self.call("GET", "/list_workers", seconds=HEALTH_SECONDS, what="list of servers")
        try:
            urls = msgspec.json.decode(response.content, type=_Workers).urls
        except msgspec.MsgspecError as error:
            raise PeerMismatchError(
                f"{self.name}: /list_workers is not that of a vllm-router ({error}): "
                "orchestrator.router_url is to name one, or nothing"
            ) from error
        return {url.rstrip("/") for url in urls}

    async def _take(self, url: str) -> bool:
        """False: it did not find the server healthy."""
        try:
            await self._tell("add_worker", url)
        except TransientError as error:
            if error.lost:
                raise
            log.warning("%s", error)
            return False
        return True

    async def _tell(self, what: str, url: str) -> None:
        await self.call("POST", f"/{what}", seconds=TAKE_SECONDS, what=f"{what} {url}", params={"url": url})


class _Workers(msgspec.Struct):
    urls: list[str]


class Routed:
    """Whichever server the router chooses, for the requests of one session: stands where a server would."""

    def __init__(self, router: Router, servers: Collection[InferenceServer], session: str) -> None:
        """`servers` that may be chosen, at least one."""
        self.router = router
        self.name = router.name
        self._servers, self._session = servers, session

    @property
    def version(self) -> int | None:
        """The oldest weights that any of them carries."""
        return min((server.version for server in self._servers if server.version is not None), default=None)

    @property
    def lost(self) -> bool:
        """Whether any of them is."""
        return any(server.lost for server in self._servers)

    @property
    def starts(self) -> int:
        """How often any of them was looked at anew."""
        return sum(server.starts for server in self._servers)

    async def generate(self, body: dict[str, Any], *, seconds: float, what: str) -> GenerateAnswer:
        """As `InferenceServer.generate`."""
        return await self.router.generate(body, self._session, seconds=seconds, what=what)
