"""Ports: free ones, and early errors about taken ones."""

import errno
import random
import socket
from pathlib import Path

LOWEST = 10_000


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: connections of an earlier one that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return True


def pick(host: str, taken: set[int]) -> int:
    """A free port that is not in `taken`, outside the range that outgoing connections draw from.

    A server listens only many seconds after its port was picked. From the ephemeral range, which is what
    binding port 0 draws from, somebody's outgoing connection could take it meanwhile.
    """
    low, high = _ephemeral_range()
    candidates = [port for port in range(LOWEST, 65536) if not low <= port <= high and port not in taken]
    candidates = candidates or [port for port in range(LOWEST, 65536) if port not in taken]
    for port in random.sample(candidates, min(100, len(candidates))):
        if is_free(host, port):
            return port
    raise ValueError(f"no free port on {host}: 100 of {len(candidates)} tried")


def require_free(host: str, port: int, setting: str) -> None:
    """Raises ValueError that names the setting if the port is taken."""
    if not is_free(host, port):
        raise ValueError(
            f"{setting} = {port}: something listens on {host}:{port} already; stop it, or set another port "
            f"(--{setting} {port + 10 if port < 65500 else port - 10}), or 0 for a free one"
        )


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32768, 60999  # the kernel's default
    return int(low), int(high)
