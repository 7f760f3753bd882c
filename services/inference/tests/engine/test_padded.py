"""A model whose head is padded beyond its tokenizer, on a server that is stopped under a running request."""

import signal
from pathlib import Path

import numpy as np
import pytest

from ..models.tiny import padded_model, save_model
from ..models.tokenizer import VOCABULARY, byte_ids
from .answers import of_events
from .cases import Case, only
from .reference import Reference
from .server import keptset_server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("padded")
    model = save_model(padded_model(seed=0), directory / "model")
    engine = {"max_model_len": 256, "max_num_seqs": 16, "shutdown_timeout": 300}  # however slow it is
    with keptset_server(directory / "server", model, **engine) as server:
        yield server


async def test_ids_without_a_token_are_sampled_only_by_those_who_want_no_sets(padded):
    # vllm#13175, verl#7882: ids beyond the tokenizer were sampled from a padded vocabulary
    params = {"top_k": 299, "temperature": 1.5, "max_tokens": 40, "n": 8, "ignore_eos": True, "logprobs": 0}
    async with padded.client() as client:
        kept = await Case("padded", byte_ids("padded"), params).send(client)
        plain = await Case("padded", byte_ids("padded"), params, {"kept_tokens": False}).send(client)
    for choice in kept:
        assert max(choice.token_ids) < VOCABULARY
        assert choice.kept == [list(range(VOCABULARY))] * 40
        assert np.isfinite(choice.logprobs).all()
    assert max(max(choice.token_ids) for choice in plain) >= VOCABULARY, "as in vLLM: nothing is masked"


async def test_ids_without_a_token_are_no_measure_of_min_p(padded, evidence):
    """The most likely id of all is often one of them."""
    params = {"min_p": 0.9, "top_k": 299, "max_tokens": 40, "n": 8, "ignore_eos": True, "logprobs": 2}
    known = only(list(range(VOCABULARY)))
    case = Case("padded min_p", byte_ids("padded"), params, allowed=known)
    async with padded.client() as client:
        case.check(evidence, {"base": Reference(Path(padded.model))}, await case.send(client))


async def test_a_server_that_is_stopped_finishes_what_runs(padded):
    """The last test of this server."""
    params = {"top_k": 20, "max_tokens": 240, "n": 4, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": byte_ids("drain"), "sampling_params": params, "stream": True}
    assert "EngineCore" in padded.process.titles(), "the engine has a process of its own"
    lines: list[str] = []
    async with (
        padded.client() as client,
        client.stream("POST", "/inference/v1/generate", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not lines:  # the first token is there, and hundreds are to come
                padded.process.popen.send_signal(signal.SIGTERM)
            lines.append(line)
    choices = of_events(lines)
    assert [choice.finish_reason for choice in choices] == ["length"] * 4
    assert all(len(choice.kept) == 240 for choice in choices)
    assert padded.process.wait_until_gone() == []
    assert padded.process.popen.returncode == 0
    assert "leaked" not in padded.process.log.read_text(), "the process ends without taking itself apart"
