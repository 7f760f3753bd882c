"""Clients that read slowly, and clients that leave."""

import asyncio
import json
import socket
import time

import pytest

from ..models.tokenizer import byte_ids
from .answers import of_events, of_json
from .cases import Case
from .server import ANSWER_TIMEOUT

pytestmark = pytest.mark.engine


async def slow_stream(server, body: bytes, headers: dict[str, str], tokens: int) -> list[str]:
    """Lines of a stream, read through a small window and only when all its tokens have been sampled."""
    sampled = server.metric("vllm:generation_tokens_total")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    host, port = server.url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    head = {"Host": "x", "Content-Length": str(len(body)), "Connection": "close"} | server.headers | headers
    lines = ["POST /inference/v1/generate HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    async with asyncio.timeout(ANSWER_TIMEOUT):
        while server.metric("vllm:generation_tokens_total") < sampled + tokens:
            await asyncio.sleep(0.2)
        raw = await reader.read()
    writer.close()
    header, _, content = raw.partition(b"\r\n\r\n")
    assert b" 200 " in header.split(b"\r\n")[0], raw[:500]
    text = b""
    while content:  # chunked transfer encoding
        size, _, content = content.partition(b"\r\n")
        text, content = text + content[: int(size, 16)], content[int(size, 16) + 2 :]
    return text.decode().splitlines()


async def test_a_slow_reader_gets_the_same_in_fewer_pieces(tiny, tiny_versions, evidence):
    """The engine does not wait for a reader: what he missed comes merged, sets and logprobs still in line."""
    params = {"max_tokens": 220, "temperature": 1.3, "n": 12, "logprobs": 0, "ignore_eos": True, "seed": 3}
    case = Case("slow", byte_ids("slow"), params, {"kept_tokens": True}, transport="stream")
    body = {"token_ids": case.prompt, "sampling_params": params, "stream": True, "kept_tokens": True}
    lines = await slow_stream(tiny, json.dumps(body).encode(), {"X-Kept-Tokens-Format": "both"}, 12 * 220)
    pieces = [
        choice for line in lines if line.startswith("data: {") for choice in of_json(json.loads(line[6:]))
    ]
    assert max(len(piece.token_ids) for piece in pieces) > 1, "nothing was merged: the reader was not slow"
    case.check(evidence, tiny_versions, of_events(lines))


async def until_idle(server) -> None:
    end = time.monotonic() + ANSWER_TIMEOUT
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while any(server.metric(name) for name in names):
        assert time.monotonic() < end, f"sequences still run {ANSWER_TIMEOUT} s after their clients left"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kept", [True, False])
async def test_a_client_that_leaves_frees_its_sequences(tiny, stream, kept):
    await until_idle(tiny)
    before = tiny.metric("vllm:generation_tokens_total")
    # minutes of work, so that the seconds until a busy server looks at its connections do not matter
    params = {"max_tokens": 240, "n": 64, "top_k": 20, "ignore_eos": True}
    body = {"token_ids": byte_ids("leaves"), "sampling_params": params, "stream": stream, "kept_tokens": kept}
    async with tiny.client() as client:
        requests = [asyncio.create_task(client.post("/inference/v1/generate", json=body)) for _ in range(16)]
        while not tiny.metric("vllm:num_requests_running"):
            await asyncio.sleep(0.05)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    await until_idle(tiny)
    assert tiny.metric("vllm:generation_tokens_total") - before < 16 * 64 * 240 / 2, "it ran to the end"
