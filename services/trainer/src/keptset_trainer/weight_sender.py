"""Sends the weights that the training loop holds to inference's workers, when it is asked to."""

import base64
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import errands
from .buckets import buckets
from .checkpoint import published
from .folders import Folders, numbered
from .master_weights import MasterWeights
from .nccl_wire import GiveUp, StuckInGroup
from .ranks import PATIENCE, Ranks

TOLD_TO_START_AGAIN = "the weights that were on their way cannot be called back: start the trainer again"
LOOK_SECONDS = 0.05
"""Between two looks whether somebody still waits for what is sent."""
SHARE_OF_PATIENCE = 0.9
"""Of what other ranks wait for the first one: the most that it waits for receivers."""


class TransferBroken(RuntimeError):
    """A group cannot be left: the device may wait for ever for peers that are gone."""


class Wire(Protocol):
    """A group of which this process is rank 0 (`nccl_wire.NcclWire`)."""

    def broadcast(self, bucket: Tensor, give_up: GiveUp) -> None: ...

    def finish(self, give_up: GiveUp) -> None: ...

    def leave(self) -> None: ...


MakeWire = Callable[[bytes, int, torch.device, GiveUp], Wire]


class WeightSender:
    """Answers the errands `group` and `send` between two steps. All ranks take part: they gather shards.

    Args:
        folders: where errands are asked.
        model: as the trainer holds it.
        weights: its weights.
        ranks: that have shards of them; the first one sends.
        bucket_bytes: sent at a time, at least.
        mint: makes the id of a new group.
        make_wire: joins it.
    """

    def __init__(
        self,
        folders: Folders,
        model: PreTrainedModel,
        weights: MasterWeights,
        ranks: Ranks,
        bucket_bytes: int,
        mint: Callable[[], bytes],
        make_wire: MakeWire,
    ) -> None:
        self.folders, self.model, self.weights, self.ranks = folders, model, weights, ranks
        self.bucket_bytes, self.mint, self.make_wire = bucket_bytes, mint, make_wire
        self.minted: set[bytes] = set()
        self.unique_id: bytes | None = None
        self.wire: Wire | None = None
        self.differs: int | None = None
        """The version whose published weights have other bits than those that are held."""

    def is_asked(self) -> bool:
        """Whether there is something to do; asked of the first rank."""
        return errands.asked(self.folders) is not None

    def serve(self, version: int) -> None:
        """Do what is asked, while the loop holds `version`. Every rank calls this.

        Raises:
            TransferBroken: this process cannot go on.
        """
        errand = self.ranks.gathered(errands.asked(self.folders) if self.ranks.is_first else None)[0]
        if errand is None:
            return  # whoever asked has given up
        if errand["kind"] == "group":
            self._group(errand)
        else:
            self._send(errand, version)

    def _group(self, errand: dict[str, Any]) -> None:
        tensors = [
            [name, str(values.dtype).removeprefix("torch."), list(values.shape)]
            for name, values in published(self.model, self.weights)
        ]
        if not self.ranks.is_first:
            return
        # Not of the version that is held: a step that is trained once more has one that may be gone.
        newest = next(reversed(numbered(self.folders.weights, "v").values()))
        manifest = json.loads((newest / "manifest.json").read_bytes())["tensors"]
        if manifest.keys() != {name for name, *_ in tensors}:
            other = sorted(manifest.keys() ^ {name for name, *_ in tensors})[0]
            self._refuse(
                errand,
                "other_names",
                f"{type(self.model).__name__} is stored under other names than it is held under ({other}), "
                'which inference would not know: set weights.transfer = "files"',
            )
            return
        unique_id = self.mint()
        self.minted.add(unique_id)
        told = {
            "unique_id": base64.b64encode(unique_id).decode(),
            "tensors": tensors,
            "bucket_bytes": self.bucket_bytes,
        }
        errands.answer(self.folders, errand, **told)

    def _send(self, errand: dict[str, Any], version: int) -> None:
        began = time.monotonic()
        give_up = self._give_up(errand, began)
        ready = 0
        if self.ranks.is_first:
            try:
                ready = int(self._is_ready(errand, version, give_up))
            except TransferBroken as error:
                self._refuse(errand, "send_failed", str(error))
                raise
            except TimeoutError as error:
                self._refuse(errand, "peers_missing", str(error))
            except Exception as error:
                self._refuse(errand, "no_group", f"the group of the weights could not be joined: {error}")
        if not self.ranks.from_first(ready):
            return
        sent = 0
        stream = (values for _, values in published(self.model, self.weights))
        if self.wire is None:
            for _ in stream:  # the others only help to gather
                pass
            return
        try:
            for bucket in buckets(stream, self.bucket_bytes):
                self.wire.broadcast(bucket, give_up)
                sent += bucket.numel()
            self.wire.finish(give_up)
        except Exception as error:
            try:
                self._leave()
            except TransferBroken as stuck:
                self._refuse(errand, "send_failed", f"{error}; {stuck}")
                raise
            for _ in stream:  # the other ranks gather all of it
                pass
            self._refuse(errand, "peers_missing", f"version {version} was not sent: {error}")
            return
        errands.answer(self.folders, errand, version=version, bytes=sent, seconds=time.monotonic() - began)

    def _give_up(self, errand: dict[str, Any], began: float) -> GiveUp:
        look_at, seconds = began, errand["seconds"]
        if self.ranks.size > 1:  # they wait for the first rank meanwhile, in a collective
            seconds = min(seconds, SHARE_OF_PATIENCE * PATIENCE.total_seconds())

        def give_up() -> str | None:
            nonlocal look_at
            now = time.monotonic()
            if now > began + seconds:
                return f"waited {seconds:.1f} s"
            if now >= look_at:
                look_at = now + LOOK_SECONDS
                if errands.withdrawn(self.folders, errand):
                    return f"called off after {now - began:.1f} s"
            return None

        return give_up

    def _leave(self) -> None:
        """Leave the group, if there is one: its id is used up."""
        wire, self.wire = self.wire, None
        self.minted.discard(self.unique_id or b"")
        self.unique_id = None
        if wire is None:
            return
        try:
            wire.leave()
        except Exception as error:
            raise TransferBroken(f"{error}; {TOLD_TO_START_AGAIN}") from error

    def _is_ready(self, errand: dict[str, Any], version: int, give_up: GiveUp) -> bool:
        """The version is the one that is asked for, and its receivers are there."""
        if errand["version"] != version:
            self._refuse(
                errand,
                "other_version",
                f"version {errand['version']} is not what the training loop holds, which is version "
                f"{version}; it can be loaded from its files",
            )
            return False
        if version == self.differs:
            self._refuse(
                errand,
                "other_version",
                f"version {version} was trained once more with other bits than were published; it can be "
                "loaded from its files",
            )
            return False
        unique_id = base64.b64decode(errand["unique_id"])
        if unique_id not in self.minted and unique_id != self.unique_id:
            self._refuse(
                errand,
                "unknown_group",
                "the group that weights are to be sent to is not one that this training loop has made; it "
                "was started again: ask for a new group",
            )
            return False
        errands.begin(self.folders, errand)  # from here on the receivers may come
        if self.wire is None or unique_id != self.unique_id:
            self._leave()  # the old group goes before a new one comes
            self.minted.discard(unique_id)  # whoever does not come cannot come later
            try:
                self.wire = self.make_wire(unique_id, errand["world_size"], self.ranks.device, give_up)
            except StuckInGroup as error:
                raise TransferBroken(f"{error}; {TOLD_TO_START_AGAIN}") from error
            self.unique_id = unique_id
        return True

    def _refuse(self, errand: dict[str, Any], kind: str, error: str) -> None:
        errands.answer(self.folders, errand, kind=kind, error=error)
