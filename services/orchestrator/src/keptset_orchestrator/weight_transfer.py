"""Weights from GPU to GPU: the trainer is asked to send and the servers to receive, at the same time."""

import asyncio
import time
from collections.abc import Sequence

from .errors import OtherVersionError, PeerMismatchError, PeerRefusedError, TransferFailedError
from .inference import InferenceServer
from .peers import HEALTH_SECONDS
from .trainer import Trainer, WeightsGroup

POLL_SECONDS = 0.02
GRACE = 2.0
"""Seconds that the others get to say what they know of, once somebody has failed."""
LONGEST = 3600.0
"""Seconds; the most that trainer and servers take for one transfer, whatever weights_timeout is."""


class WeightTransfer:
    """Keeps the NCCL group from update to update, and makes a new one when somebody was started again.

    Args:
        trainer: Rank 0.
        seconds: For one update, all in all; no more than LONGEST.
    """

    def __init__(self, trainer: Trainer, seconds: float) -> None:
        self._trainer, self._seconds = trainer, min(seconds, LONGEST)
        self._group: WeightsGroup | None = None
        self._members: list[tuple[str, int, int]] = []

    async def update(self, version: int, servers: Sequence[InferenceServer]) -> None:
        """Have all of them carry a version that the trainer holds.

        The servers are asked once the trainer is ready to send: until then nothing has been touched, and a
        trainer that refuses leaves them as they were.

        Raises:
            OtherVersionError: the trainer holds later weights by now, or will once it can send any.
            PeerMismatchError: the trainer or a server does not do this.
            PeerUnavailableError: the trainer did not say what it holds, or make a group, in time.
            TransferFailedError: somebody did not take part in time; the text names who said so, and of whom.
                The others were called off; their next update has a new group.
            PeerRefusedError: with the peer's own words.
        """
        deadline = time.monotonic() + self._seconds
        status = await self._trainer.status(seconds=self._seconds)
        if not status.sends_weights:
            raise PeerMismatchError(
                f'{self._trainer.name} sends no weights: set weights.transfer = "nccl" for it too, or "files"'
            )
        if max(status.training or 0, status.weight_version) > version:
            at = f" and trains step {status.training}" if status.training else ""
            raise OtherVersionError(
                f"{self._trainer.name} cannot send weights version {version} any more: it has published "
                f"version {status.weight_version}{at}"
            )
        if status.training is not None and status.training < version <= status.weight_version:
            raise OtherVersionError(
                f"{self._trainer.name} was started again and trains step {status.training} once more: it "
                f"does not hold weights version {version} yet"
            )
        members = [(server.url, server.starts, status.loop_pid or 0) for server in servers]
        if self._group is None or members != self._members:
            self._group = await self._trainer.weights_group(seconds=self._seconds)
            self._members = members
        world_size = 1 + sum(server.workers for server in servers)
        sending = asyncio.create_task(
            self._trainer.send_weights(version, self._group.unique_id, world_size, seconds=self._seconds)
        )
        begun = asyncio.create_task(self._begun(version, deadline))
        tasks = [sending]
        try:
            await asyncio.wait({sending, begun}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                begun.result()  # raises: it did not begin in time
            if not sending.done() or sending.exception() is None:  # else it has refused
                left = max(0.05, deadline - time.monotonic())
                rank = 1
                for server in servers:
                    transfer = {
                        "unique_id": self._group.unique_id,
                        "bucket_bytes": self._group.bucket_bytes,
                        "tensors": self._group.tensors,
                        "rank_offset": rank,
                        "world_size": world_size,
                        "seconds": left,
                    }
                    rank += server.workers
                    # its own words about the time that is up say more
                    receiving = server.load_weights(version, seconds=left + HEALTH_SECONDS, transfer=transfer)
                    tasks.append(asyncio.create_task(receiving))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(not task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=GRACE)
            failures = [one for task in tasks if task.done() and (one := task.exception()) is not None]
            names = [self._trainer.name, *(server.name for server in servers)]
            silent = [name for name, task in zip(names, tasks, strict=False) if not task.done()]
        except BaseException:
            self._group = None
            raise
        finally:
            for task in (*tasks, begun):
                task.cancel()  # closes the connection, which calls off whoever still waits for the others
            await asyncio.gather(*tasks, begun, return_exceptions=True)
        if failures:
            self._group = None
            for failure in failures:
                if isinstance(failure, PeerRefusedError):  # nothing that passes, and nobody is lost
                    raise failure
            trainer_lost = any(isinstance(one, TransferFailedError) and one.trainer_lost for one in failures)
            # what one of them says of another is the consequence, what a server says first the cause
            said = [str(failure) for failure in failures]
            if silent:
                said.append(f"called off with no answer yet: {', '.join(silent)}")
            raise TransferFailedError("; ".join(said), trainer_lost=trainer_lost) from failures[-1]

    async def _begun(self, version: int, deadline: float) -> None:
        """The trainer is ready to be joined."""
        while (await self._trainer.status(seconds=self._seconds)).sending != version:
            if time.monotonic() > deadline:
                raise TransferFailedError(
                    f"{self._trainer.name} did not begin to send weights version {version} within "
                    f"weights_timeout = {self._seconds:g} s",
                    trainer_lost=False,
                )
            await asyncio.sleep(POLL_SECONDS)
