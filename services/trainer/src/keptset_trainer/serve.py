"""`keptset-trainer`: the ingest process. Starts the training loop, serves the API, ends when either ends.

With `trainer.ranks = "external"` somebody else starts the training loop, and it may come and go.
"""

import fcntl
import math
import signal
import socket
import sys
import threading
import time
from typing import IO

import uvicorn

from keptset_settings import load_service

from .app import build_app
from .child import TrainingLoop, visible_gpus
from .claim import lock_of_the_loop
from .durable import sweep, write_file
from .external import ExternalLoop
from .folders import Folders, folders_of
from .guards import guarded
from .heartbeat import Sign
from .resume import where_to_start
from .spool import Spool
from .torchrun import SHUTDOWN_VARIABLE
from .watched import WatchedLoop

REQUESTS_SECONDS = 5
"""For requests in work to end, before the training loop is told to."""
LOOP = "keptset_trainer.loop"
LOCK_PATIENCE = 30.0
"""Seconds to wait for the loop of a trainer that was killed a moment ago."""


def serve(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT (0), or until the training loop dies or does not end as it should (1)."""
    if "--help" in argv or "-h" in argv:
        print("keptset-trainer [serve] --config FILE ...")
        print("keptset-trainer replay --config FILE [--step N] ...")
        print("keptset-trainer warm-start --directory DIR ...\n")
    settings = load_service("trainer", argv)
    assert settings.model
    folders = folders_of(settings)
    try:
        folders.create()
        lock = take_lock(folders)
        sweep(folders.spool)  # its own alone: external ranks may be writing the rest right now
        where_to_start(settings, folders)
        spool = Spool(folders, settings.max_waiting_batches)
        if settings.ranks != "external":  # before other settings are written, for which those ranks would end
            lock_of_the_loop(folders, Sign(folders), LOCK_PATIENCE).close()
        own_ranks = visible_gpus() if settings.ranks == "auto" else settings.ranks
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        listener = bound_socket(settings.host, settings.port)
    except OSError as error:
        where = f"trainer.host = {settings.host!r}, trainer.port = {settings.port}"
        way_out = "stop what listens there, or set another port"
        print(f"{where}: {error.strerror or error}; {way_out}", file=sys.stderr)
        return 1  # it may be free after another start
    # ranks that somebody else starts may be started elsewhere
    places = {name: getattr(settings, name).absolute() for name in ("output_dir", "weights_dir")}
    write_file(folders.settings, settings.model_copy(update=places).model_dump_json(indent=1).encode())
    loop: WatchedLoop
    if own_ranks == "external":
        loop = ExternalLoop(folders, settings.ranks_timeout)
        wait = f"{SHUTDOWN_VARIABLE}={math.ceil(settings.shutdown_timeout)}"
        torchrun = f"{wait} torchrun ... -m {LOOP} {folders.settings}"
        print(f"trainer: its ranks are external: {torchrun}", flush=True)
    else:
        print(
            f"trainer: told to stop, it ends within {REQUESTS_SECONDS + settings.shutdown_timeout:g} s: "
            f"trainer.shutdown_timeout = {settings.shutdown_timeout:g} is for a last checkpoint, "
            f"{REQUESTS_SECONDS} s for requests; whoever stops it must wait longer than that",
            flush=True,
        )
        loop = TrainingLoop(folders, lock.fileno(), own_ranks)
    app = build_app(
        spool,
        loop,
        model=settings.model,
        row_tokens=settings.row_tokens,
        max_batch_bytes=settings.max_batch_bytes,
        unsafe_ignore_kept_tokens=settings.unsafe_ignore_kept_tokens,
        full_vocabulary_scores=settings.full_vocabulary_scores,
        sends_weights=settings.weights_transfer == "nccl",
        shares_gpu=settings.gpu_lock is not None,
        stop=lambda reason: server.give_up(reason),
    )
    server = IngestServer(
        uvicorn.Config(
            guarded(app, settings),
            log_level="warning",
            timeout_graceful_shutdown=REQUESTS_SECONDS,
        ),
        loop,
    )
    # before uvicorn's own handlers are in place, and after, when it sends itself the signal once more
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    threading.Thread(target=server.watch, name="watch-loop", daemon=True).start()
    try:
        server.run(sockets=[listener])
    finally:
        failure = loop.failure() or server.reason
        went_wrong = loop.stop(settings.shutdown_timeout)
    failure = failure or went_wrong
    if failure is not None:
        print(f"{failure}\nlast lines of the training loop:", file=sys.stderr)
        for line in loop.lines:
            print(f"  {line}", file=sys.stderr)
        return 1
    return 0 if server.started else 1


def bound_socket(host: str, port: int) -> socket.socket:
    """Taken before the loop is started, so that a port in use is known at once; not listening yet.

    Raises:
        OSError: the address cannot be had.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class IngestServer(uvicorn.Server):
    """Ends with the training loop, and lets waiting requests go when it is told to stop."""

    def __init__(self, config: uvicorn.Config, loop: WatchedLoop) -> None:
        super().__init__(config)
        self.loop = loop
        self.reason: str | None = None
        """Why it ended by itself, the loop apart."""

    def handle_exit(self, sig: int, frame: object) -> None:
        # asked twice, it goes on stopping: a rank that has ended by then has not failed
        self.loop.stopping = self.loop.stopping or self.loop.is_running()
        super().handle_exit(sig, frame)

    def give_up(self, reason: str) -> None:
        """End with exit code 1."""
        self.reason = reason
        self.should_exit = True

    def watch(self) -> None:
        """Waits for the children in a thread of its own."""
        self.loop.wait()
        self.should_exit = True


def take_lock(folders: Folders) -> IO[bytes]:
    """The lock of the output directory, which the training loop inherits.

    Raises:
        ValueError: another trainer has held it for LOCK_PATIENCE seconds, or the file system has no locks.
    """
    lock = folders.lock.open("wb")
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"trainer.output_dir {folders.output}: waited {LOCK_PATIENCE:.0f} s for another trainer "
                    "that uses it; stop that one or choose another directory"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            raise ValueError(
                f"{folders.lock} cannot be locked ({error.strerror}), so two trainers could take in batches "
                "side by side; put trainer.output_dir on a file system with locks (a local one, NFS from "
                "version 4, CephFS, Lustre with -o flock)"
            ) from error
