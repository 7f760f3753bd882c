"""An ingest process that starts while external ranks go on writing: it looks at directories that change."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kept_tokens.messages import TrainingBatch, encode
from keptset_settings import TrainerSettings
from keptset_trainer import resume, train
from keptset_trainer import spool as spool_module
from keptset_trainer.folders import Folders
from keptset_trainer.ranks import Ranks
from keptset_trainer.resume import where_to_start
from keptset_trainer.spool import Spool

from .stored_run import folders_of, results_of, run, spool
from .test_ranks import on_ranks


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders(tmp_path / "trainer", tmp_path / "weights")
    folders.create()
    return folders


def finish(folders: Folders, step: int, batch: TrainingBatch | None = None) -> None:
    """What ranks leave of a step, in their order."""
    saved = folders.checkpoint(step)
    saved.mkdir()
    (saved / "checkpoint.json").write_text(json.dumps({"step": step, "model": "m"}))
    folders.version(step).mkdir()
    if batch is not None:
        result = {"step": step, "content_hash": batch.content_hash.hex(), "metrics": {}}
        folders.result(step).write_text(json.dumps(result))
        folders.batch(step).unlink()
    for old in folders.checkpoints.iterdir():
        if int(old.name.removeprefix("step-")) <= step - 2:
            (old / "checkpoint.json").unlink()
            old.rmdir()


def just_before(monkeypatch: pytest.MonkeyPatch, module, name: str, call: int, happens: Callable[[], None]):
    """Let something happen before the `call`-th call of a function."""
    real, calls = getattr(module, name), []

    def late(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            happens()
        return real(*arguments)

    monkeypatch.setattr(module, name, late)


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_start_between_two_steps_of_ranks_is_no_other_run(folders, monkeypatch, call, steps):
    """Whichever directory it looks at first, last or in between."""
    for step in range(steps):
        finish(folders, step)
    just_before(monkeypatch, resume, "numbered", call, lambda: finish(folders, steps))
    _, record = where_to_start(TrainerSettings(model="m"), folders)
    assert record["step"] in (max(0, steps - 1), steps)


def test_a_checkpoint_that_newer_ones_replace_is_not_missed(folders, monkeypatch):
    finish(folders, 0)
    monkeypatch.setattr(resume, "numbered", once_stale(folders))
    _, record = where_to_start(TrainerSettings(model="m"), folders)
    assert record["step"] == 2


def once_stale(folders: Folders) -> Callable[[Path, str], dict[int, Path]]:
    """Two steps end between the look at the checkpoints and the look into the newest."""
    real, done = resume.numbered, []

    def look(folder: Path, prefix: str) -> dict[int, Path]:
        there = real(folder, prefix)
        if folder == folders.checkpoints and not done:
            done.append(folder)
            finish(folders, 1)
            finish(folders, 2)
        return there

    return look


@pytest.mark.parametrize(("name", "call"), [("numbered", 1), ("numbered", 2), ("whole_batch", 1)])
def test_a_batch_that_is_trained_and_removed_meanwhile_was_accepted(
    folders, make_batch, monkeypatch, name, call
):
    batch = make_batch(1)
    folders.batch(1).write_bytes(encode(batch))
    just_before(monkeypatch, spool_module, name, call, lambda: finish(folders, 1, batch))
    spool = Spool(folders, 64)
    assert (spool.next_step, spool.trained_step, spool.hashes[1]) == (2, 1, batch.content_hash)


def test_all_ranks_go_on_from_the_checkpoint_that_the_first_one_finds(
    settings, make_batch, tmp_path, leaves_when_there_is_nothing_to_train
):
    """On a shared file system another node may see a directory as it was a minute ago."""
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings)
    spool(folders, make_batch(2))

    def work(ranks: Ranks) -> None:
        if not ranks.is_first:
            train.where_to_start = lambda *_: (None, {"step": 0, "content_hash": None, "metrics": {}})
        train.train(settings, ranks, None)

    on_ranks(2, work, tmp_path)
    assert list(results_of(folders)) == ["step-000001.json", "step-000002.json"]
