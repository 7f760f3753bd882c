"""Rank 0 of an NCCL group whose other ranks are inference's workers; no vLLM."""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .nccl import Communicator, library

POLL_SECONDS = 0.001
JOIN_POLL_SECONDS = 0.05
IN_FLIGHT = 2
"""Buffers that may be on their way; the receiver has two as well."""
ABORT_SECONDS = 10.0
PROOF_SECONDS = 60.0

GiveUp = Callable[[], str | None]
"""Why it is of no use to wait any longer, if that is so. Asked often."""


class PeersMissing(TimeoutError):
    """Others of the group did not come, or did not take what was sent, in time."""


class StuckInGroup(RuntimeError):
    """The group could not be left: what was on its way may hold the device for ever."""


def new_unique_id() -> bytes:
    """128 bytes that the ranks of a new group find each other by; this process must be one of them."""
    return library().unique_id()


def prove(device: torch.device) -> str:
    """NCCL's version, once a group of this process alone has been made, has carried a buffer and is left.

    Raises:
        NcclError: NCCL is not there, or refuses.
        PeersMissing: it does not come back.
        StuckInGroup: likewise.
    """
    until = time.monotonic() + PROOF_SECONDS

    def give_up() -> str | None:
        return f"waited {PROOF_SECONDS:g} s" if time.monotonic() > until else None

    wire = NcclWire(new_unique_id(), 1, device, give_up)
    wire.broadcast(torch.zeros(1024, dtype=torch.uint8, device=device), give_up)
    wire.finish(give_up)
    wire.leave()
    return library().version()


class NcclWire:
    """The group, once all are there: joining blocks, so all join at about the same time.

    vLLM's workers join by the unique id (`NCCLWeightTransferInitInfo.nccl_unique_id_b64`), after which each
    rank owes one all_reduce of one float32.
    """

    def __init__(self, unique_id: bytes, world_size: int, device: torch.device, give_up: GiveUp) -> None:
        """Wait for the `world_size - 1` others.

        Raises:
            PeersMissing: not all of them joined before `give_up`. The thread that waits cannot be called off;
                it dies with the process.
        """
        self.device, self.world_size = device, world_size
        self.stream = torch.cuda.Stream(device)
        self.comm: Communicator | None = None
        self.sent: deque[tuple[torch.cuda.Event, Tensor]] = deque()

        def join() -> None:
            self.comm = comm = Communicator(unique_id, world_size, rank=0)
            with torch.cuda.stream(self.stream):
                comm.all_reduce(torch.zeros(1, device=device), self.stream.cuda_stream)
            self.stream.synchronize()

        why = self._called(join, give_up, JOIN_POLL_SECONDS)
        if why is not None:
            if self.comm is not None:  # somebody is gone since, and the device waits
                self.leave()
            raise PeersMissing(
                f"not all of {world_size - 1} inference worker(s) have joined the group that weights are "
                f"sent to: {why}"
            )

    def broadcast(self, bucket: Tensor, give_up: GiveUp) -> None:
        """Send a buffer that was made on the current stream; waits while IN_FLIGHT are on their way.

        Raises:
            PeersMissing: the oldest was not taken before `give_up`.
        """
        assert self.comm is not None
        while len(self.sent) >= IN_FLIGHT:
            self._wait_for_oldest(give_up)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        # NCCL makes the connections of a way that it has not taken yet, and waits for all ranks meanwhile
        call = partial(self.comm.broadcast, bucket, 0, self.stream.cuda_stream)
        if (why := self._called(call, give_up, POLL_SECONDS)) is not None:
            raise self._not_taken(why)
        event = torch.cuda.Event()
        event.record(self.stream)
        self.sent.append((event, bucket))

    def finish(self, give_up: GiveUp) -> None:
        """Wait until all is sent; raises like `broadcast`."""
        while self.sent:
            self._wait_for_oldest(give_up)

    def leave(self) -> None:
        """End the group on this side, and what is still on its way; nothing may be sent afterwards.

        Raises:
            StuckInGroup: NCCL did not let go.
        """
        assert self.comm is not None
        thread = threading.Thread(target=self.comm.abort, name="leave-weights-group", daemon=True)
        with torch.cuda.device(self.device):
            thread.start()
        thread.join(ABORT_SECONDS)
        deadline = time.monotonic() + ABORT_SECONDS
        while not self.stream.query() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if thread.is_alive() or not self.stream.query():
            raise StuckInGroup("NCCL does not let go of the group that weights were sent to")
        self.sent.clear()

    def _wait_for_oldest(self, give_up: GiveUp) -> None:
        event, _ = self.sent[0]
        while not event.query():
            if (why := give_up()) is not None:
                raise self._not_taken(why)
            time.sleep(POLL_SECONDS)
        self.sent.popleft()

    def _not_taken(self, why: str) -> PeersMissing:
        return PeersMissing(
            f"not all of {self.world_size - 1} inference worker(s) have taken what was sent: {why}"
        )

    def _called(self, call: Callable[[], None], give_up: GiveUp, poll_seconds: float) -> str | None:
        """Call what may wait for other ranks; why nobody waits for it any more, if it has not returned."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                torch.cuda.set_device(self.device)
                call()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="weights-group", daemon=True)
        thread.start()
        why = None
        while thread.is_alive() and (why := give_up()) is None:
            thread.join(poll_seconds)
        if failures:
            raise failures[0]
        return why if thread.is_alive() else None
