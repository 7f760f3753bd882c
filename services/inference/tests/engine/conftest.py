"""The servers and models that the tests share, and the numbers that they found."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from ..models.published import directory_name, publish
from ..models.tiny import save_model, tiny_model
from .evidence import Evidence
from .reference import Reference
from .server import Server, keptset_server

API_KEY = "only-for-tests"

TINY_ENGINE = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64}
TINY_ENGINE |= {"block_size": 32, "num_gpu_blocks_override": 16}
"""Prompts of more than 64 tokens are prefilled in chunks; about three whole sequences fit the KV cache."""

_SESSION = Evidence()


@pytest.fixture(scope="session", autouse=True)
def stop_servers_on_sigterm() -> None:
    """As on Ctrl-C: fixtures end, and with them the servers."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def session_evidence(sections) -> Iterator[Evidence]:
    """The numbers of all tests; the share of sets that differ at the edge is judged over all of them."""
    torch.set_num_threads(1)  # more would wait for each other longer than they compute
    yield _SESSION
    if _SESSION.counts:
        sections["kept sets and logprobs against transformers"] = _SESSION.lines()
    _SESSION.check_edges()


@pytest.fixture
def evidence(session_evidence) -> Evidence:
    """The numbers of one test, also added to those of the session."""
    return Evidence(session_evidence)


@dataclass
class Versions:
    """What is published for one server, and the reference of each version."""

    base: Path
    root: Path
    _directories: dict[str, Path] = field(default_factory=dict)
    _references: dict[str, Reference] = field(default_factory=dict)
    last: int = 0

    def publish(self, model: Path) -> int:
        """Publish a model directory under the next number."""
        self.last += 1
        self._directories[directory_name(self.last)] = publish(model, self.root, self.last)
        return self.last

    def publish_model(self, model: Qwen3ForCausalLM) -> int:
        """Publish a model under the next number."""
        return self.publish(save_model(model, self.root.parent / f"made{self.last + 1}"))

    def __getitem__(self, version: str) -> Reference:
        """The reference of a version as spans name it; "base" is what the server started with."""
        if version not in self._references:
            directory = self.base if version == "base" else self._directories[version]
            self._references[version] = Reference(directory)
        return self._references[version]


@pytest.fixture(scope="session")
def tiny_versions(tmp_path_factory) -> Versions:
    """Models for the tiny server: 261 ids."""
    directory = tmp_path_factory.mktemp("tiny")
    root = directory / "weights"
    root.mkdir()
    return Versions(save_model(tiny_model(seed=0), directory / "base"), root)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tiny_versions) -> Iterator[Server]:
    """A capturing server with 261 ids, chunked prefill, a small KV cache, weight updates and an API key. It
    takes turns on its GPU: it starts asleep, and is woken here.
    """
    directory = tmp_path_factory.mktemp("tiny-server")
    with keptset_server(
        directory,
        tiny_versions.base,
        api_key=API_KEY,
        weights=tiny_versions.root,
        gpu_lock=directory / "gpu.lock",
        **TINY_ENGINE,
    ) as server:
        assert server.call("GET", "/health").json() == {"state": "asleep"}
        assert server.wake()["version"] is None
        yield server
