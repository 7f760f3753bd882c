"""What a run remembers: SQLite in one file, `state.sqlite` below the output directory.

    groups     every finished group: what was asked, the versions that sampled it, the batch that it went
               into; its rollouts until the step's row is written
    batches    every batch that was tried: its hash, what its row says of its rollouts, the version it gave
    cursors    which examples of each source's stream a step has

After each call what it says survives a crash (WAL, synchronous = FULL), so that a batch, say, is remembered
before it leaves.
"""

import fcntl
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from .errors import DiskError

LAYOUT = 1
"""Of the tables; a file of another layout is refused."""

TABLES = """
CREATE TABLE groups (
    step INTEGER NOT NULL, position INTEGER NOT NULL,
    name TEXT NOT NULL, source TEXT NOT NULL, fingerprint BLOB NOT NULL,
    oldest_version INTEGER, newest_version INTEGER,
    rollouts BLOB, batch TEXT,
    PRIMARY KEY (step, position)
);
CREATE TABLE batches (
    step INTEGER NOT NULL, content_hash TEXT NOT NULL,
    metrics BLOB NOT NULL, accepted INTEGER NOT NULL DEFAULT 0, weight_version INTEGER,
    PRIMARY KEY (step, content_hash)
);
CREATE TABLE cursors (
    step INTEGER NOT NULL, source TEXT NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL,
    PRIMARY KEY (step, source)
);
"""


@dataclass(frozen=True)
class StoredGroup:
    """One finished group.

    Attributes:
        name: "<source>/<step>/<position>".
        source: Name of its source.
        fingerprint: Of what was asked (`stored_groups.fingerprint`).
        versions: The oldest and the newest weights that sampled a token of it; None: a frozen generator did.
        rollouts: As `stored_groups.pack_group` gives them.
    """

    name: str
    source: str
    fingerprint: bytes
    versions: tuple[int, int] | None
    rollouts: bytes


@dataclass(frozen=True)
class BatchRecord:
    """One batch that was handed in, or was to be.

    Attributes:
        step: The step.
        content_hash: Hex.
        metrics: What the row says of its rollouts.
    """

    step: int
    content_hash: str
    metrics: dict[str, float]


class RunState:
    """The state of the run whose output directory is `directory`. Calls may come from any thread.

    Args:
        directory: Of the run; it is there.
        patience: Seconds to wait for an orchestrator that was killed a moment ago.

    Raises:
        ValueError: another orchestrator uses it, or the file is none of ours.
        DiskError: the disk does not give or take it.
    """

    def __init__(self, directory: Path, patience: float = 10.0) -> None:
        self.path = directory / "state.sqlite"
        self._turn = threading.Lock()
        self._lock = _locked(directory / "state.lock", patience)
        try:
            self._database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        with self._explained():
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
        with self._transaction() as database:
            (layout,) = database.execute("PRAGMA user_version").fetchone()
            if layout == 0:
                for statement in TABLES.split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {LAYOUT}")
        if layout not in (0, LAYOUT):
            raise ValueError(
                f"{self.path}: has layout {layout}, this version of the orchestrator reads {LAYOUT}; go on "
                "with the version that wrote it, or start a run with another output_dir"
            )

    def close(self) -> None:
        """Let others use it."""
        with self._turn:
            self._database.close()
            self._lock.close()

    def cursors(self, step: int, spans: Mapping[str, range]) -> dict[str, range]:
        """Which examples of each source's stream a step has, remembered from now on.

        They begin where the step before ended, also if the shares were others then: no example is left out
        or asked twice. A source that is new begins where it would have been, had it always had its share.
        Steps ask in their order.

        Args:
            step: The step.
            spans: What each source would have, had the shares always been these.
        """
        cursors = {}
        with self._transaction() as database:
            for source, span in spans.items():
                known = database.execute(
                    "SELECT start, stop FROM cursors WHERE step = ? AND source = ?", (step, source)
                ).fetchone()
                if known is None or known[1] - known[0] != len(span):
                    (before,) = database.execute(
                        "SELECT max(stop) FROM cursors WHERE step < ? AND source = ?", (step, source)
                    ).fetchone()
                    start = span.start if before is None else before
                    database.execute("DELETE FROM cursors WHERE step >= ? AND source = ?", (step, source))
                    database.execute(
                        "INSERT INTO cursors VALUES (?, ?, ?, ?)", (step, source, start, start + len(span))
                    )
                else:
                    start = known[0]
                cursors[source] = range(start, start + len(span))
        return cursors

    def add_group(self, step: int, position: int, group: StoredGroup) -> None:
        """A group is finished; one that was there before gives way."""
        oldest, newest = group.versions or (None, None)
        with self._transaction() as database:
            database.execute(
                "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                (
                    step,
                    position,
                    group.name,
                    group.source,
                    group.fingerprint,
                    oldest,
                    newest,
                    group.rollouts,
                ),
            )

    def groups(self, step: int) -> dict[int, StoredGroup]:
        """The finished groups of a step that still have their rollouts, by position."""
        with self._transaction() as database:
            rows = database.execute(
                "SELECT position, name, source, fingerprint, oldest_version, newest_version, rollouts "
                "FROM groups WHERE step = ? AND rollouts IS NOT NULL",
                (step,),
            ).fetchall()
        return {
            position: StoredGroup(name, source, mark, None if old is None else (old, new), rollouts)
            for position, name, source, mark, old, new, rollouts in rows
        }

    def add_batch(self, record: BatchRecord, groups: int) -> None:
        """A batch is about to be handed in, of the step's groups at positions 0 to `groups` - 1."""
        with self._transaction() as database:
            database.execute(
                "INSERT OR REPLACE INTO batches (step, content_hash, metrics) VALUES (?, ?, ?)",
                (record.step, record.content_hash, msgspec.json.encode(record.metrics)),
            )
            database.execute("DELETE FROM groups WHERE step = ? AND position >= ?", (record.step, groups))
            database.execute("UPDATE groups SET batch = ? WHERE step = ?", (record.content_hash, record.step))

    def accept(self, step: int, content_hash: str) -> None:
        """The trainer holds this batch of the step: the others are forgotten."""
        with self._transaction() as database:
            database.execute("DELETE FROM batches WHERE step = ? AND content_hash != ?", (step, content_hash))
            database.execute("UPDATE batches SET accepted = 1 WHERE step = ?", (step,))
            database.execute("UPDATE groups SET batch = ? WHERE step = ?", (content_hash, step))

    def not_accepted(self, step: int) -> None:
        """The trainer holds no batch of this step or a later one, whatever it once said."""
        with self._transaction() as database:
            database.execute(
                "UPDATE batches SET accepted = 0, weight_version = NULL WHERE step >= ?", (step,)
            )

    def batch(self, step: int, content_hash: str | None = None) -> BatchRecord | None:
        """A batch of a step: the one with this hash, else the accepted one, else the last that was tried."""
        with self._transaction() as database:
            row = database.execute(
                "SELECT content_hash, metrics FROM batches "
                "WHERE step = ? AND content_hash = ifnull(?, content_hash) "
                "ORDER BY accepted DESC, rowid DESC LIMIT 1",
                (step, content_hash),
            ).fetchone()
        if row is None:
            return None
        return BatchRecord(step, row[0], msgspec.json.decode(row[1], type=dict[str, float]))

    def finish(self, step: int, weight_version: int) -> None:
        """The step's row is written: its rollouts have served."""
        with self._transaction() as database:
            database.execute("UPDATE batches SET weight_version = ? WHERE step = ?", (weight_version, step))
            database.execute("UPDATE groups SET rollouts = NULL WHERE step <= ?", (step,))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on the disk after the end."""
        with self._turn, self._explained():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise _in_words(error, self.path) from error


def _in_words(error: sqlite3.DatabaseError, path: Path) -> Exception:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if primary in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return ValueError(
            f"{path}: not the state of a run, or damaged ({error}); put back a copy, or move it away: then "
            "groups that are in no batch yet are sampled again"
        )
    if primary == sqlite3.SQLITE_FULL:
        return DiskError(
            f"{path}: the disk is full; free some space and start again: what was acknowledged is there"
        )
    return DiskError(f"{path}: {error}; look at the disk and start again: what was acknowledged is there")


def _locked(path: Path, patience: float) -> IO[bytes]:
    lock = path.open("wb")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise ValueError(
                    f"orchestrator.output_dir {path.parent}: waited {patience:g} s for another orchestrator "
                    "that uses it; stop that one, or choose another directory"
                ) from None
            time.sleep(0.05)
