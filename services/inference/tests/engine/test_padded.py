"""A model whose head is padded beyond its tokenizer, on a server that is stopped under a running request."""

import asyncio
import signal
import time

import numpy as np
import pytest

from ..models.tiny import padded_model, save_model
from ..models.tokenizer import VOCABULARY, byte_ids
from .answers import of_json
from .cases import Case
from .server import keptset_server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("padded")
    model = save_model(padded_model(seed=0), directory / "model")
    with keptset_server(directory / "server", model, max_model_len=256, max_num_seqs=16) as server:
        yield server


async def test_ids_without_a_token_are_sampled_only_by_those_who_want_no_sets(padded):
    params = {"top_k": 300, "temperature": 1.5, "max_tokens": 40, "n": 8, "ignore_eos": True, "logprobs": 0}
    async with padded.client() as client:
        kept = await Case("padded", byte_ids("padded"), params).send(client)
        plain = await Case("padded", byte_ids("padded"), params, {"kept_tokens": False}).send(client)
    for choice in kept:
        assert max(choice.token_ids) < VOCABULARY
        assert choice.kept == [list(range(VOCABULARY))] * 40
        assert np.isfinite(choice.logprobs).all()
    assert max(max(choice.token_ids) for choice in plain) >= VOCABULARY, "as in vLLM: nothing is masked"


async def test_a_server_that_is_stopped_finishes_what_runs(padded):
    """The last test of this server."""
    params = {"top_k": 20, "max_tokens": 240, "n": 4, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": byte_ids("drain"), "sampling_params": params}
    async with padded.client() as client:
        running = asyncio.create_task(client.post("/inference/v1/generate", json=body))
        deadline = time.monotonic() + 30
        while not await asyncio.to_thread(padded.metric, "vllm:num_requests_running"):
            assert time.monotonic() < deadline, "the request never ran"
        assert not running.done()
        padded.process.popen.send_signal(signal.SIGTERM)
        answer = await running
    assert answer.status_code == 200, answer.text
    choices = of_json(answer.json())
    assert [choice.finish_reason for choice in choices] == ["length"] * 4
    assert all(len(choice.kept) == 240 for choice in choices)
    assert padded.process.wait_until_gone(20) == []
    assert padded.process.popen.returncode == 0
    assert "leaked" not in padded.process.log.read_text(), "the process ends without taking itself apart"
