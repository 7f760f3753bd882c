"""A proxy in front of a real inference server that damages some of its answers on their way."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

Damage = Callable[[bytes], tuple[str, bytes]]
"""Of an answer's body: the content type and the body that are sent instead."""

HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "date", "server"}


class DamagingProxy(ThreadingHTTPServer):
    """Passes everything on; `damages` says what happens to the n-th answer of /inference/v1/generate."""

    daemon_threads = True

    def __init__(self, target: str, damages: dict[int, Damage]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.damages, self.answered = target, damages, 0
        self.lock = threading.Lock()
        self.client = httpx.Client(base_url=target, timeout=300, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: DamagingProxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.pass_on()

    def do_POST(self) -> None:
        self.pass_on()

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        try:
            answer = self.server.client.request(self.command, self.path, content=body, headers=headers)
        except httpx.TransportError:  # it starts, or ends
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        kind, content = answer.headers.get("content-type", ""), answer.content
        if self.path == "/inference/v1/generate":
            with self.server.lock:
                number, self.server.answered = self.server.answered, self.server.answered + 1
            if number in self.server.damages:
                kind, content = self.server.damages[number](content)
        self.send_response(answer.status_code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def damaging_proxy(target: str, damages: dict[int, Damage]) -> Iterator[DamagingProxy]:
    """Serves until the `with` ends."""
    with DamagingProxy(target, damages) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
