"""A group of processes in place of an NCCL group: who is gone is not noticed, but takes nothing any more."""

import multiprocessing
import socket
import time
from collections.abc import Callable

import torch

from keptset_trainer.nccl_wire import GiveUp, PeersMissing

PATIENCE = 20.0


class SocketWire:
    """Rank 0: buffers go to all others over a Unix socket each, and each says when it has taken one."""

    def __init__(self, address: str, world_size: int, give_up: GiveUp) -> None:
        self.peers: list[socket.socket] = []
        self.sent = 0
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(PATIENCE)
            while len(self.peers) < world_size - 1:
                self.peers.append(listener.accept()[0])
        for peer in self.peers:
            peer.setblocking(False)

    def broadcast(self, bucket: torch.Tensor, give_up: GiveUp) -> None:
        self.sent += 1
        content = bucket.numpy().tobytes()
        for peer in self.peers:
            self._until(lambda peer=peer: peer.send(len(content).to_bytes(8, "little")) == 8, give_up)
            left = memoryview(content)
            while left:
                left = left[self._until(lambda peer=peer, left=left: peer.send(left), give_up) :]
        for peer in self.peers:
            self._until(lambda peer=peer: peer.recv(1) == b"+", give_up)

    def finish(self, give_up: GiveUp) -> None:
        for peer in self.peers:
            peer.send(bytes(8))

    def leave(self) -> None:
        for peer in self.peers:
            peer.close()

    def _until(self, done: Callable[[], int], give_up: GiveUp) -> int:
        while True:
            try:
                if did := done():
                    return did
            except OSError:  # would block, or gone: NCCL makes no difference
                pass
            if (why := give_up()) is not None:
                raise PeersMissing(
                    f"not all of {len(self.peers)} inference worker(s) have taken what was sent: {why}"
                )
            time.sleep(0.001)


class Receiver:
    """A process that joins one group after the other."""

    def __init__(self, addresses: list[str]) -> None:
        context = multiprocessing.get_context("fork")
        self._reader, writer = context.Pipe(duplex=False)
        self._taken = context.Value("i", 0)
        self.process = context.Process(target=receive, args=(addresses, writer, self._taken), daemon=True)
        self.process.start()

    def wait_for(self, buffers: int) -> None:
        """Until it has taken so many, all in all."""
        while self._taken.value < buffers:
            time.sleep(0.001)

    def buffers(self) -> tuple[bool, list[torch.Tensor]]:
        """Of the next group: whether that was all, and what has come."""
        assert self._reader.poll(PATIENCE)
        whole, buffers = self._reader.recv()
        return whole, [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in buffers]


def receive(addresses: list[str], writer, taken) -> None:
    for address in addresses:
        connection = socket.socket(socket.AF_UNIX)
        for _ in range(int(PATIENCE / 0.01)):
            try:
                connection.connect(address)
                break
            except OSError:
                time.sleep(0.01)
        stream, buffers, whole = connection.makefile("rb"), [], False
        try:
            while len(header := stream.read(8)) == 8:
                size = int.from_bytes(header, "little")
                content = stream.read(size)
                whole = size == 0
                if whole or len(content) < size:
                    break
                buffers.append(content)
                time.sleep(0.02)
                taken.value += 1
                connection.send(b"+")
        except OSError:
            pass
        writer.send((whole, buffers))
