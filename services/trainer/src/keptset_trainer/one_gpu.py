"""The trainer's turns on a GPU that it shares with engines: it is there only while it steps."""

import os
import time

import torch
from torch import Tensor, nn

from keptset_guards import GpuTurn

from .master_weights import MasterWeights
from .offload import Offload
from .optimizer import AdamW
from .ranks import Ranks

PATIENCE = 7200.0
"""Seconds that engines may have the GPU while the trainer needs it: it has a batch, or starts."""
SECONDS_BETWEEN_WORDS = 30.0
POLL_SECONDS = 0.02
SECONDS_FOR_OTHERS = 0.5
"""After each turn, in which engines that wait for one find it: they look every 0.05 s."""


class OneGpu:
    """Whose turn it is, and what comes and goes with it. Every rank calls the same methods."""

    def __init__(self, turn: GpuTurn, ranks: Ranks) -> None:
        """The first rank has the turn for all of them."""
        self.turn, self.ranks = turn, ranks
        self.offload = Offload(ranks.device) if leaves(ranks.device) else None
        self.is_away = False
        self.waits_since: float | None = None
        self.word_at = 0.0
        self.left_at: float | None = None

    def is_ours(self) -> bool:
        """Whether it is the trainer's turn; asked of the first rank as often as it likes.

        Raises:
            ValueError: it has not been for PATIENCE seconds of asking.
        """
        now = time.monotonic()
        if self.left_at is not None and now - self.left_at < SECONDS_FOR_OTHERS:
            return False
        if self.turn.try_to_take():
            self.waits_since = self.left_at = None
            return True
        if self.waits_since is None:
            self.waits_since, self.word_at = now, now + 1
        if now - self.waits_since > PATIENCE:
            raise ValueError(
                f"waited {PATIENCE:.0f} s for the GPU, which {self.turn.holder()} has ({self.turn.path}): "
                "put the engine to sleep, with POST /keptset/v1/sleep"
            )
        if now >= self.word_at:
            print(f"trainer: waiting for the GPU, which {self.turn.holder()} has", flush=True)
            self.word_at = now + SECONDS_BETWEEN_WORDS
        return False

    def first_turn(self, parent: int | None) -> None:
        """Before anything is put on the GPU: wait for it; `parent` is this process's, None if there is none.

        Raises:
            ValueError: as `is_ours`.
        """
        ours = 0
        while not ours:
            word_at = time.monotonic() + SECONDS_BETWEEN_WORDS  # the other ranks know the first one alive
            while self.ranks.is_first and not ours and time.monotonic() < word_at:
                ours = int(self.is_ours())
                if not ours:
                    if parent is not None and os.getppid() != parent:
                        raise SystemExit(f"the ingest process {parent} is gone")
                    time.sleep(POLL_SECONDS)
            ours = self.ranks.from_first(ours)

    def leave(self, model: nn.Module, weights: MasterWeights, optimizer: AdamW) -> dict[str, float]:
        """All that is the trainer's leaves; when every rank's has, the engines may come. Metrics of it."""
        assert not self.is_away
        began = time.monotonic()
        if self.offload is not None:
            weights.drop_gradients()
            weights.moved()
            optimizer.moved()
            gone = self.offload.leave(kept(model, weights, optimizer), weights.scratch())
            if self.ranks.is_first:
                self._tell("leave", gone, time.monotonic() - began)
        self.ranks.gathered(None)  # everybody's has left
        self.is_away = True
        if self.ranks.is_first:
            self.turn.give_back()
            self.left_at = time.monotonic()
        return {"seconds/offload": time.monotonic() - began}

    def come_back(self) -> dict[str, float]:
        """Where it is the trainer's turn: all that left is back. Metrics of it.

        Raises:
            ValueError: the GPU has not the room.
        """
        began = time.monotonic()
        if self.offload is not None and self.is_away:
            there = self.offload.come_back()
            if self.ranks.is_first:
                self._tell("come back", there, time.monotonic() - began)
        self.is_away = False
        return {"seconds/reload": time.monotonic() - began}

    def _tell(self, what: str, size: int, seconds: float) -> None:
        device = self.ranks.device
        stays = torch.cuda.memory_reserved(device) / 1e6 if device.type == "cuda" else 0.0
        said = f", {stays:.0f} MB of torch's stay" if what == "leave" else ""
        print(f"trainer: {size / 1e9:.2f} GB {what} {device} in {seconds:.2f} s{said}", flush=True)


def leaves(device: torch.device) -> bool:
    """Whether there is anything to be had from leaving: a CPU's memory is the host's."""
    return device.type != "cpu"


def kept(model: nn.Module, weights: MasterWeights, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that the next step reads."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [
        *model.parameters(),
        *model.buffers(),
        *weights.named.values(),
        *weights.held(),
        *(value for value in states if isinstance(value, Tensor)),
    ]
