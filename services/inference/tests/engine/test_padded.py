"""A model whose head is padded beyond its tokenizer, on a server that is stopped under a running request."""

import asyncio
import signal
from pathlib import Path

import httpx
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


SAMPLING = {"max_tokens": 120, "n": 8, "ignore_eos": True}
ROUTES = {
    "/inference/v1/generate": {"token_ids": byte_ids("asked"), "sampling_params": {"top_k": 20, **SAMPLING}},
    "/v1/completions": {"prompt": byte_ids("asked"), **SAMPLING},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "asked"}], **SAMPLING},
}


async def test_a_server_that_is_stopped_finishes_what_runs_and_takes_nothing_on(padded):
    """The last test of this server."""
    assert "EngineCore" in padded.process.titles(), "the engine has a process of its own"
    stopping = asyncio.Event()
    answers: list[tuple[bool, bool, httpx.Response]] = []  # sent, and there, after it was told to stop

    async def ask_on(client: httpx.AsyncClient, path: str) -> None:
        """A client that is never without a request, whatever it is answered, until nobody answers."""
        while True:
            late = stopping.is_set()
            try:
                answer = await client.post(path, json=ROUTES[path])
            except httpx.TransportError:
                assert late, f"{path}: cut off"
                return
            answers.append((late, stopping.is_set(), answer))

    params = {"top_k": 20, "max_tokens": 240, "n": 4, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": byte_ids("drain"), "sampling_params": params, "stream": True}
    lines: list[str] = []
    refused: list[httpx.Response] = []
    async with padded.client() as client, asyncio.TaskGroup() as clients:
        for path in ROUTES:
            for _ in range(2):
                clients.create_task(ask_on(client, path))
        while not answers:  # the others are under way as well
            await asyncio.sleep(0.05)
        async with client.stream("POST", "/inference/v1/generate", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if not lines:  # the first token is there, and hundreds are to come
                    padded.process.popen.send_signal(signal.SIGTERM)
                    stopping.set()
                    while (health := await client.get("/health")).status_code == 200:
                        await asyncio.sleep(0.05)
                    assert (await client.get("/keptset/v1/status")).json()["stopping"]
                    assert (await client.get("/metrics")).status_code == 200
                    weights = await client.post("/keptset/v1/weights", json={"version": 1})
                    refused = [health, weights, *[await client.post(p, json=ROUTES[p]) for p in ROUTES]]
                lines.append(line)
    choices = of_events(lines)
    assert [choice.finish_reason for choice in choices] == ["length"] * 4
    assert all(len(choice.kept) == 240 for choice in choices)
    for _, there, answer in answers:
        if answer.status_code == 200:
            assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * 8
        else:
            assert there, "refused before the server was told to stop"
            refused.append(answer)
    for answer in refused:
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "stopping"
        assert int(answer.headers["retry-after"]) > 0
    ended = [answer for late, there, answer in answers if not late and there and answer.status_code == 200]
    assert ended, "others were under way"
    assert padded.process.wait_until_gone() == []
    assert padded.process.popen.returncode == 0
    log = padded.process.log.read_text()
    assert "leaked" not in log, "the process ends without taking itself apart"
    assert "Traceback" not in log
