"""A run from its settings to its end: peers, checks, state, and then the loop."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from keptset_settings import EndpointSettings, OrchestratorSettings, resolve_orchestrator

from .build import build_sources
from .errors import PeerUnavailableError
from .fleet import Fleet
from .inference import InferenceServer, InferenceStatus
from .loop import Loop
from .peers import TransientError
from .preflight import (
    check_same_server,
    check_server,
    check_trainer,
    check_turns,
    warn_of_idle_filters,
    warn_of_padding,
)
from .progress import Progress
from .router import Router
from .sources import Source
from .state import RunState
from .step_sampler import Lengths, StepSampler
from .together import together
from .tokenizer import ChatTokenizer
from .trainer import Trainer, TrainerStatus
from .weight_transfer import WeightTransfer

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
    urls = (trainer_url, settings.router_url or "", *settings.inference_urls, *foreign_urls(settings))
    https = any(url.startswith("https:") for url in urls)
    async with (
        httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=https) as client,
        opened(output_dir) as state,
    ):
        trainer = Trainer(trainer_url, client, token)
        servers = [InferenceServer(url, client, key, token) for url in settings.inference_urls]
        build_sources(settings, 1, client)  # what is wrong with them shows before anybody is waited for
        if settings.colocated:
            await _free_gpus(servers, settings)
        patience = settings.start_patience
        await together(peer.wait_healthy(patience) for peer in (trainer, *servers))
        status = await trainer.status(seconds=settings.startup_timeout)
        sources = build_sources(settings, status.vocab_size, client)
        check_trainer(trainer.name, status, sources, settings.colocated)
        warn_of_idle_filters(settings.train.source, status.vocab_size)
        warn_of_padding(tokenizer.vocab_size, status.vocab_size, sources)
        context = _Context(sources, trainer, status, colocated=settings.colocated)
        fleet = Fleet(
            servers,
            context.check,
            startup_timeout=settings.startup_timeout,
            weights_timeout=settings.weights_timeout,
            transfer=WeightTransfer(trainer, settings.weights_timeout)
            if settings.weights_transfer == "nccl"
            else None,
            router=None if settings.router_url is None else Router(settings.router_url, client, key),
            colocated=settings.colocated,
        )
        try:
            await fleet.inspect()
            sampler = StepSampler(
                settings,
                sources,
                fleet,
                tokenizer,
                status.vocab_size,
                uuid.uuid4().hex[:8],
                state,
                progress,
            )
            loop = Loop(
                settings,
                progress,
                trainer,
                status,
                fleet,
                sampler,
                context.lengths,
                tokenizer,
                state,
                output_dir,
            )
            await loop.run()
        finally:
            await fleet.close()
    progress.state = "done"


async def _free_gpus(servers: Sequence[InferenceServer], settings: OrchestratorSettings) -> None:
    """Put all servers to sleep: an orchestrator that was killed may have left them awake, and a trainer that
    was started since waits for their GPU.
    """

    async def free(server: InferenceServer) -> None:
        await server.wait_healthy(settings.start_patience)
        try:
            await server.sleep(seconds=settings.weights_timeout)
        except TransientError as error:
            raise PeerUnavailableError(str(error)) from error

    await together(free(server) for server in servers)


@asynccontextmanager
async def opened(output_dir: Path) -> AsyncIterator[RunState]:
    """The state of the run, which nobody else uses meanwhile."""
    state = await asyncio.to_thread(RunState, output_dir)
    try:
        yield state
    finally:
        await asyncio.to_thread(state.close)


def foreign_urls(settings: OrchestratorSettings) -> list[str]:
    """The URLs of endpoints that are not ours."""
    endpoints = [*(s.generator for s in settings.train.source), *(s.reference for s in settings.train.source)]
    return [one.url for one in endpoints if isinstance(one, EndpointSettings)]


@dataclass
class _Context:
    """What every server is checked against; remembers what each said first, and the shortest context."""

    sources: Sequence[Source]
    trainer: Trainer
    status: TrainerStatus
    colocated: bool = False
    max_model_len: int | None = None
    first: dict[InferenceServer, InferenceStatus] = field(default_factory=dict)

    def check(self, server: InferenceServer, status: InferenceStatus) -> None:
        check_server(server.name, status, self.sources, self.trainer.name, self.status)
        check_turns(server.name, status.sleep is not None, self.colocated)
        check_same_server(server.name, self.first.setdefault(server, status), status)
        log.info("%s: %s, vLLM %s, capture %s", server.name, status.model, status.vllm, status.capture.kind)
        shortest = self.max_model_len or status.max_model_len
        self.max_model_len = min(shortest, status.max_model_len)

    def lengths(self) -> Lengths:
        """What sequences must fit."""
        assert self.max_model_len is not None, "servers are inspected before the first rollout"
        return Lengths(self.max_model_len, self.status.row_tokens)
