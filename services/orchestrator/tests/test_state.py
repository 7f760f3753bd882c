"""What the state of a run holds, and that it survives whatever ends the process."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept_tokens import KeptTokens
from keptset_orchestrator import Calculator, ReverseText
from keptset_orchestrator.algorithms import make_algorithm
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.endpoints import Endpoint
from keptset_orchestrator.errors import DiskError
from keptset_orchestrator.rollouts import Group
from keptset_orchestrator.sources import Prompt, Source
from keptset_orchestrator.state import BatchRecord, RunState, StoredGroup
from keptset_orchestrator.stored_groups import fingerprint, pack_group, span_of_versions, unpack_group
from keptset_settings import EndpointSettings, OpsdAlgorithm

GROUP = StoredGroup("a/1/0", "a", b"mark", (0, 2), b"rollouts")


@pytest.fixture
def state(tmp_path: Path):
    opened = RunState(tmp_path)
    yield opened
    opened.close()


def again(state: RunState) -> RunState:
    state.close()
    return RunState(state.path.parent)


def test_group_is_there_after_a_restart_until_its_row_is_written(state: RunState):
    state.add_group(1, 0, GROUP)
    state = again(state)
    assert state.groups(1) == {0: GROUP}
    assert state.groups(2) == {}
    state.add_batch(BatchRecord(1, "aa", {}), 1)
    state.accept(1, "aa")
    assert state.groups(1) == {0: GROUP}
    state.finish(1, 1)
    assert state.groups(1) == {}
    rows = sqlite3.connect(state.path).execute("SELECT step, position, name, batch FROM groups").fetchall()
    assert rows == [(1, 0, "a/1/0", "aa")], "which batch it went into stays known"
    state.close()


def test_batches_are_found_by_step_and_hash(state: RunState):
    first, second = BatchRecord(1, "aa", {"x": 1.0}), BatchRecord(1, "bb", {"x": 2.0})
    state.add_batch(first, 0)
    state.add_batch(second, 0)
    assert state.batch(1) == second, "the last that was tried"
    assert state.batch(1, "aa") == first
    assert state.batch(1, "cc") is None
    assert state.batch(2) is None
    state.accept(1, "aa")
    assert state.batch(1) == first
    assert state.batch(1, "bb") is None


def test_batch_that_the_trainer_lost_no_longer_counts_as_accepted(state: RunState):
    state.add_batch(BatchRecord(1, "aa", {}), 0)
    state.accept(1, "aa")
    state.not_accepted(1)
    state.add_batch(BatchRecord(1, "bb", {}), 0)
    assert state.batch(1) == BatchRecord(1, "bb", {})


def test_cursor_goes_on_where_the_step_before_ended(state: RunState):
    first = {"a": range(4), "b": range(2)}
    assert state.cursors(1, first) == first
    second = {"a": range(4, 8), "b": range(2, 4)}
    assert state.cursors(2, second) == second
    assert state.cursors(2, second) == second, "asked again it is the same"
    assert state.cursors(3, {"a": range(16, 24), "b": range(4, 4)}) == {"a": range(8, 16), "b": range(4, 4)}
    assert state.cursors(4, {"a": range(24, 32), "b": range(4, 6)}) == {
        "a": range(16, 24),
        "b": range(4, 6),
    }, "a larger share leaves no example out"
    assert state.cursors(4, {"a": range(3, 4), "c": range(9, 12)}) == {"a": range(16, 17), "c": range(9, 12)}


def test_run_of_before_there_was_a_state_goes_on_with_its_own_examples(state: RunState):
    assert state.cursors(7, {"a": range(24, 28)}) == {"a": range(24, 28)}


def test_second_orchestrator_is_refused(state: RunState):
    with pytest.raises(ValueError, match=r"waited 0\.1 s for another orchestrator that uses it"):
        RunState(state.path.parent, patience=0.1)


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"no database, but long enough to be looked at" * 40, "not the state of a run, or damaged")],
)
def test_file_that_is_no_state_is_named_with_the_way_out(content: bytes, text: str, tmp_path: Path):
    (tmp_path / "state.sqlite").write_bytes(content)
    with pytest.raises(ValueError, match=rf"state\.sqlite: {text}.* move it away"):
        RunState(tmp_path)


def test_state_of_another_layout_is_refused(state: RunState):
    path = state.path
    state.close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ValueError, match="has layout 99"):
        RunState(path.parent)


def test_full_disk_is_named_and_loses_nothing(state: RunState):
    state.add_group(1, 0, GROUP)
    pages = state._database.execute("PRAGMA page_count").fetchone()[0]
    state._database.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to be full
    with pytest.raises(DiskError, match=r"state\.sqlite: the disk is full; free some space"):
        state.add_group(1, 1, StoredGroup("a/1/1", "a", b"mark", None, os.urandom(1 << 16)))
    state._database.execute("PRAGMA max_page_count = 1000000")
    assert state.groups(1) == {0: GROUP}
    state.add_group(1, 1, GROUP)
    assert len(again(state).groups(1)) == 2


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path):
    script = (
        "import sys\nfrom pathlib import Path\nfrom keptset_orchestrator.state import RunState, StoredGroup\n"
        "state = RunState(Path(sys.argv[1]))\nn = 0\n"
        "while True:\n"
        "    state.add_group(1, n, StoredGroup('g', 's', b'', None, bytes(5000)))\n"
        "    n += 1\n    print(n, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        for line in child.stdout:
            if int(line) >= 20:
                child.send_signal(signal.SIGKILL)
                acknowledged = int(line)
                break
        acknowledged = max([acknowledged, *map(int, child.stdout.read().split())])
    state = RunState(tmp_path)
    assert len(state.groups(1)) in (acknowledged, acknowledged + 1)
    state.close()


def source(**changes: object) -> Source:
    sampling = {"temperature": 1.0, "top_p": 0.9}
    return Source(**{"name": "a", "environment": ReverseText(4, 8), "sampling": sampling, "truncates": True,
                     "prompt_seed": 0, "sampling_seed": 0, **changes})  # fmt: skip


def endpoint(url: str, model: str) -> Endpoint:
    return Endpoint("frozen generator", EndpointSettings(url=url, model=model), httpx.AsyncClient())


PROMPT = Prompt(source(), "a/1/0", "abcd", [1, 2], 7)

completions = st.builds(
    lambda rows, kept, sampled, reference, versions: Completion(
        token_ids=np.array([row[0] for row in rows], np.int32),
        logprobs=np.array([-0.5 * n for n in range(len(rows))], np.float32),
        kept=KeptTokens.from_rows(rows) if kept else None,
        finish_reason="stop",
        stop_token_id=3 if kept else None,
        weight_versions=[(versions, 0, len(rows))] if rows else [],
        sampled=np.arange(len(rows)) % 2 == 0 if sampled else None,
        reference=np.full(len(rows), -1.5, np.float32) if reference else None,
    ),
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5, unique=True).map(sorted), max_size=6),
    *[st.booleans()] * 3,
    st.integers(0, 10**6),
)


@given(st.lists(completions, max_size=4))
def test_group_is_the_same_after_the_state(ones: list[Completion]):
    group = Group(PROMPT, ones, [0.25 * n for n in range(len(ones))])
    read = unpack_group(PROMPT, pack_group(group))
    assert read.rewards == group.rewards
    for got, put in zip(read.completions, ones, strict=True):
        for name in ("token_ids", "logprobs", "sampled", "reference"):
            a, b = getattr(got, name), getattr(put, name)
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and np.array_equal(a, b))
        assert (got.kept is None) == (put.kept is None)
        assert got.kept is None or got.kept.rows() == put.kept.rows()
        assert (got.finish_reason, got.stop_token_id) == (put.finish_reason, put.stop_token_id)
        assert got.weight_versions == put.weight_versions
    versions = [version for one in ones for version, _, _ in one.weight_versions]
    assert span_of_versions(group) == ((min(versions), max(versions)) if versions else None)


@pytest.mark.parametrize(
    "other",
    [
        Prompt(source(sampling={"temperature": 0.9, "top_p": 0.9}), "a/1/0", "abcd", [1, 2], 7),
        Prompt(source(group_size=2), "a/1/0", "abcd", [1, 2], 7),
        Prompt(source(environment=ReverseText(4, 9)), "a/1/0", "abcd", [1, 2], 7),
        Prompt(source(), "a/1/0", "abcd", [1, 3], 7),
        Prompt(source(), "a/1/0", "abcd", [1, 2], 8),
        Prompt(source(), "a/2/0", "abcd", [1, 2], 7),
        Prompt(source(frozen=endpoint("http://h/v1", "m")), "a/1/0", "abcd", [1, 2], 7),
    ],
)
def test_whatever_changes_the_rollouts_changes_the_fingerprint(other: Prompt):
    assert fingerprint(PROMPT, 99) == fingerprint(Prompt(source(), "a/1/0", "abcd", [1, 2], 7), 99)
    assert fingerprint(other, 99) != fingerprint(PROMPT, 99)


@pytest.mark.parametrize("who", ["frozen", "reference"])
def test_another_model_at_the_same_address_is_another(who: str):
    """Its rollouts, or its scores, are not those that were stored."""
    ones = [Prompt(source(**{who: endpoint("http://h/v1", m)}), "a/1/0", "abcd", [1, 2], 7) for m in "mn"]
    assert fingerprint(ones[0], 99) != fingerprint(ones[1], 99)


def test_another_hint_shows_the_policy_something_else():
    """So the scores that were stored with the rollouts are not those that opsd would have now."""
    said = [make_algorithm(OpsdAlgorithm(hint=f"{word} {{solution}}")) for word in ("It is", "Perhaps")]
    ones = [Prompt(source(algorithm=one), "a/1/0", "abcd", [1, 2], 7) for one in said]
    assert fingerprint(ones[0], 99) != fingerprint(ones[1], 99)


@pytest.mark.parametrize(
    ("changes", "decides"),
    [
        ({}, True),
        ({"sampling": {"temperature": 1.0, "max_tokens": 5}}, False),
        ({"sampling": {"temperature": 1.0, "max_tokens": 5}, "environment": Calculator(2, 9, 3)}, True),
        ({"frozen": True}, False),
    ],
)
def test_room_counts_where_it_decides_on_the_rollouts(changes: dict, decides: bool):
    """Whoever changes trainer.row_tokens and resumes keeps the groups that do not depend on it."""
    if "frozen" in changes:
        changes = {"frozen": endpoint("http://h/v1", "m")}
    prompt = Prompt(source(**changes), "a/1/0", "abcd", [1, 2], 7)
    assert (fingerprint(prompt, 99) != fingerprint(prompt, 98)) is decides


def test_errors_of_the_disk_are_named(state: RunState, monkeypatch: pytest.MonkeyPatch):
    class Broken:
        in_transaction = False

        def execute(self, *_: object) -> None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    real = state._database
    monkeypatch.setattr(state, "_database", Broken())
    with pytest.raises(DiskError, match=r"state\.sqlite: disk I/O error; look at the disk"):
        state.add_group(1, 0, GROUP)
    monkeypatch.setattr(state, "_database", real)
