"""Whoever kills the server, nothing that it started stays."""

import subprocess
import sys
import time

import pytest

PARENT = """
import subprocess, sys, time
from keptset_inference.orphans import watch_over_children
watch_over_children()
stubborn = ("import signal, setproctitle, time; setproctitle.setproctitle('VLLM::Worker' + 'x' * 5000);"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
child = subprocess.Popen([sys.executable, "-c", "import subprocess, sys, time;"
    "grandchild = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True);"
    "print(grandchild.pid, flush=True); time.sleep(600)", stubborn])
print(child.pid, flush=True)
sys.stdin.read()
"""


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # gone, before it was looked at or meanwhile
        return False


class Server:
    """A process with a child and a grandchild, which ignores SIGTERM and gives itself a title."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PARENT]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.children = [int(self.process.stdout.readline()) for _ in range(2)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_children_and_grandchildren_end_with_the_server_however_it_ends():
    killed, terminated, left = servers = [Server() for _ in range(3)]
    time.sleep(1.5)  # a title wipes the environment out of /proc: the tree must have been looked at before
    assert all(alive(child) for server in servers for child in server.children)
    killed.process.kill()
    terminated.process.terminate()
    left.process.stdin.close()  # ends by itself
    end = time.monotonic() + 120
    while time.monotonic() < end and any(alive(child) for server in servers for child in server.children):
        time.sleep(0.1)
    assert [alive(child) for server in servers for child in server.children] == [False] * 6
    for server in servers:
        server.process.wait(60)
