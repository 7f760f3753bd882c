"""A refusal reaches a client that is still sending, over a real connection."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from keptset_guards import AccessGuard, BodyGuard, LoadGuard, Secret, Turns

SIZE = 8 << 20
"""More than any buffer of the system takes."""


async def never(scope, receive, send) -> None:
    """Behind the guards, which let nothing through; BodyGuard lets it read."""
    while (await receive())["type"] != "http.disconnect":
        pass


GUARDED = {
    "401": AccessGuard(never, Secret("inference.api_key", "secret")),
    "413": BodyGuard(never, 1000),
    "429": LoadGuard(never, Turns(0, None)),
}


@pytest.fixture(params=["h11", "httptools"])
def served(request) -> Iterator[dict[str, int]]:
    """The port of each guard's server."""
    pytest.importorskip(request.param)
    ports, servers = {}, []
    for name, app in GUARDED.items():
        config = uvicorn.Config(app, port=0, http=request.param, log_level="warning", lifespan="off")
        listening = config.bind_socket()
        listening.listen()  # whoever comes before the server waits
        ports[name] = listening.getsockname()[1]
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        servers.append((server, thread, listening))
    yield ports
    for server, thread, listening in servers:
        server.should_exit = True
        thread.join(60)
        listening.close()


def answer_to(port: int, head: str, parts: list[bytes], pause: float = 0.0) -> tuple[int, dict]:
    """Sends everything, and reads only then."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"POST /any HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        for part in parts:
            time.sleep(pause)
            client.sendall(part)
        time.sleep(pause)
        got = b""
        while block := client.recv(65536):
            got += block
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("status", GUARDED)
def test_a_client_that_sends_all_before_it_reads_gets_the_answer(served, status):
    code, error = answer_to(served[status], f"Content-Length: {SIZE}", [b"x" * SIZE])
    assert str(code) == status
    assert error["message"]


@pytest.mark.parametrize("status", GUARDED)
def test_a_body_that_comes_after_the_answer_does_not_destroy_it(served, status):
    code, _ = answer_to(served[status], "Content-Length: 4000", [b"x" * 2000] * 2, pause=0.1)
    assert str(code) == status
    chunk = b"%x\r\n%s\r\n" % (2000, b"x" * 2000)
    parts = [chunk, chunk, b"0\r\n\r\n"]
    code, _ = answer_to(served[status], "Transfer-Encoding: chunked", parts, pause=0.1)
    assert str(code) == status


def test_nobody_is_read_for_ever(served):
    """Whoever goes on sending, or falls silent, is cut off some time after the answer."""
    began = time.monotonic()
    code, _ = answer_to(served["401"], "Content-Length: 4000", [b"x"])
    assert code == 401
    assert time.monotonic() - began < 30
