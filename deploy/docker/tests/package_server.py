"""What pip finds on this machine only (folders of wheels), served to builds on loopback."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def pip_settings() -> dict[str, str]:
    """Where pip looks, by the names of its variables, whichever file or variable says so."""
    names = ("index-url", "extra-index-url", "find-links", "trusted-host")
    command = [sys.executable, "-m", "pip", "config", "list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: dict[str, str] = {}
    for line in printed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in names:  # variables come last, and win as they do with pip
            found[f"PIP_{name.replace('-', '_').upper()}"] = " ".join(value.strip("'\"").split("\\n"))
    return {name: text.strip() for name, text in found.items()}


@contextmanager
def served_packages() -> Iterator[dict[str, str]]:
    """Build arguments with which pip finds in a build what it finds here."""
    settings, servers = pip_settings(), list[ThreadingHTTPServer]()
    try:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
            places = [_reachable(place, servers) for place in settings.get(name, "").split()]
            settings[name] = " ".join(place for place in places if place)
        yield {name: text for name, text in settings.items() if text}
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _reachable(place: str, servers: list[ThreadingHTTPServer]) -> str:
    """A folder becomes an address; an address stays; a folder that is not there goes."""
    parts = urlsplit(place)
    folder = Path(unquote(parts.path) if parts.scheme == "file" else place)
    if parts.scheme not in ("", "file"):
        return place
    if not folder.is_dir():
        return ""
    # An index may refer to files beside itself, so its parent is what is served.
    root = folder.parent if folder.name == "simple" else folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=os.fspath(root)))
    servers.append(server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/{'simple/' if root != folder else ''}"
