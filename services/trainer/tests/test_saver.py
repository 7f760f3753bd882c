"""Checkpoints at every n-th step: a trainer may be killed at any moment, and trains again what came after."""

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.checkpoint.api import CheckpointException

from kept_tokens.messages import TrainingBatch
from keptset_trainer import checkpoint, durable, train
from keptset_trainer.folders import Folders, numbered
from keptset_trainer.saver import Saver
from keptset_trainer.train_step import NotFinite

from .stored_run import bytes_under, folders_of, results_of, run, spool
from .test_objectives import frozen, with_reference
from .test_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("leaves_when_there_is_nothing_to_train")


class Killed(BaseException):
    """What a kill -9 looks like from inside."""


def killed_before(write: int, monkeypatch) -> list[int]:
    """From the write of that number on nothing reaches the disk any more; the list counts the writes."""
    count = [0]

    def dying(function):
        def call(*arguments, **options):
            count[0] += 1
            if count[0] > write:
                raise Killed
            return function(*arguments, **options)

        return call

    for owner, name in (
        (durable, "fsync_path"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (shutil, "rmtree"),
        (shutil, "copyfile"),
        (os, "link"),
        (checkpoint.dcp, "save"),
    ):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    return count


@pytest.mark.parametrize("interval", [1, 2])
def test_a_trainer_killed_before_any_write_loses_and_repeats_nothing(
    interval, settings, make_batch, tmp_path, monkeypatch
):
    batches = [make_batch(step, samples=3) for step in (1, 2, 3)]

    def fresh(name: str):
        changed = settings.model_copy(
            update={
                "output_dir": tmp_path / name,
                "weights_dir": tmp_path / f"{name}-weights",
                "keep_weights": 2,
                "checkpoint_interval": interval,
            }
        )
        folders = folders_of(changed)
        spool(folders, *batches)
        return changed, folders

    undisturbed, expected = fresh("undisturbed")
    with monkeypatch.context() as patch:
        writes = killed_before(10**9, patch)
        run(undisturbed)
    assert writes[0] > 100
    # One in thirty takes ten seconds, all of them minutes; which ones is drawn anew each time.
    for write in range(random.randrange(30), writes[0], 30):
        killed, folders = fresh(f"killed-{write}")
        with monkeypatch.context() as patch:
            killed_before(write, patch)
            with pytest.raises((Killed, CheckpointException)):  # which is what the saving makes of it
                run(killed)
        published = bytes_under(folders.weights)
        run(killed)
        for name, content in published.items():
            if not name.startswith(durable.TEMPORARY) and (folders.weights / name).exists():
                assert (folders.weights / name).read_bytes() == content, (
                    f"{name} changed after it was published"
                )
        assert bytes_under(folders.weights) == bytes_under(expected.weights), f"killed before write {write}"
        assert results_of(folders) == results_of(expected), f"killed before write {write}"
        shutil.rmtree(folders.output)
        shutil.rmtree(folders.weights)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def batches_of(folders: Folders) -> list[int]:
    return sorted(numbered(folders.spool, "step-"))


def killed_run(settings, folders: Folders, monkeypatch) -> None:
    """As `run`, but nobody tells it to stop: it is gone where it waits for a batch that is not there."""
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "at_the_end", raise_killed)
        with pytest.raises(Killed):
            run(settings)


def raise_killed(*_: object) -> None:
    raise Killed


def test_a_version_is_published_after_every_step_whatever_the_interval(settings, make_batch, tmp_path):
    published = []
    for interval in (1, 3):
        own = settings.model_copy(
            update={
                "output_dir": tmp_path / f"{interval}",
                "weights_dir": tmp_path / f"{interval}-weights",
                "checkpoint_interval": interval,
            }
        )
        folders = folders_of(own)
        spool(folders, *[make_batch(step, samples=2) for step in range(1, 6)])
        run(own)
        published.append((bytes_under(folders.weights), results_of(folders)))
    assert published[0] == published[1]
    assert names(folders.checkpoints) == ["step-000003", "step-000005"], "one when it was told to stop, too"


def test_batches_stay_for_as_long_as_a_checkpoint_before_them_is_the_one_to_go_on_from(
    settings, make_batch, tmp_path, monkeypatch
):
    kept = {2: [1, 2], 3: [1, 2, 3], 5: [1, 2, 3, 4, 5], 6: [4, 5, 6], 8: [4, 5, 6, 7, 8], 9: [7, 8, 9]}
    for step, left in kept.items():
        own = settings.model_copy(update={"checkpoint_interval": 3, "output_dir": tmp_path / f"{step}"})
        own = own.model_copy(update={"weights_dir": tmp_path / f"{step}-weights"})
        folders = folders_of(own)
        spool(folders, *[make_batch(one, samples=2) for one in range(1, step + 1)])
        killed_run(own, folders, monkeypatch)
        assert batches_of(folders) == left, f"after step {step}"


def test_what_came_after_the_checkpoint_is_trained_once_more_and_changes_nothing(
    settings, make_batch, monkeypatch, capfd
):
    settings = settings.model_copy(update={"checkpoint_interval": 10, "full_vocabulary_scores": True})
    folders = folders_of(settings)
    spool(folders, *[make_batch(step, samples=2) for step in (1, 2, 3)])
    killed_run(settings, folders, monkeypatch)
    there = [bytes_under(one) for one in (folders.weights, folders.results, folders.scores)]
    assert names(folders.checkpoints) == ["step-000000"]
    capfd.readouterr()
    killed_run(settings, folders, monkeypatch)
    assert [bytes_under(one) for one in (folders.weights, folders.results, folders.scores)] == there
    said = capfd.readouterr().out
    assert "going on from the checkpoint of step 0: the batches of steps 1 to 3 are trained once more" in said
    assert "step 3 again: the same bits as version 3" in said
    assert names(folders.checkpoints) == ["step-000000", "step-000003"], "and not a third time"
    killed_run(settings, folders, monkeypatch)
    assert "again" not in capfd.readouterr().out

    spool(folders, make_batch(4, samples=2))
    run(settings)
    assert names(folders.checkpoints) == ["step-000003", "step-000004"]
    capfd.readouterr()
    run(settings)
    assert "again" not in capfd.readouterr().out, "stopped in an orderly way it has nothing to do again"


def test_other_bits_the_second_time_are_said_and_the_version_stays(settings, make_batch, monkeypatch, capfd):
    """As another device's rounding would, here a learning rate that nobody knows of. What it came to is what
    the trainer goes on from, and is never published as the version that is there.
    """
    settings = settings.model_copy(update={"checkpoint_interval": 10})
    folders = folders_of(settings)
    spool(folders, make_batch(1), make_batch(2))
    killed_run(settings, folders, monkeypatch)
    there = bytes_under(folders.weights)
    lr = settings.optimizer.lr * (1 + 1e-5)
    other = settings.model_copy(update={"optimizer": settings.optimizer.model_copy(update={"lr": lr})})
    folders.recipe.unlink()
    killed_run(other, folders, monkeypatch)
    assert bytes_under(folders.weights) == there
    assert "step 2 again: other bits in" in capfd.readouterr().out
    assert names(folders.checkpoints) == ["step-000000", "step-000002"]

    spool(folders, make_batch(3))
    killed_run(other, folders, monkeypatch)
    killed_run(other, folders, monkeypatch)  # from a checkpoint whose version is other and not the newest
    said = capfd.readouterr().out
    assert "step 2 again" not in said
    assert "step 3 again: the same bits as version 3" in said
    for name, content in bytes_under(folders.weights).items():
        assert there.get(name, content) == content, f"{name} changed after it was published"
    assert names(folders.checkpoints) == ["step-000002", "step-000003"]
    run(other)


def test_a_trainer_that_lives_shorter_than_an_interval_goes_on_all_the_same(
    settings, make_batch, monkeypatch, capfd
):
    settings = settings.model_copy(update={"checkpoint_interval": 1000})
    folders = folders_of(settings)
    for step in range(1, 5):
        spool(folders, make_batch(step, samples=2))
        killed_run(settings, folders, monkeypatch)
        again = capfd.readouterr().out.count("again: the same bits")
        assert again == (step > 1), "one step was new in each life, and one is trained once more"
        assert sorted(numbered(folders.checkpoints, "step-"))[-1] == step - 1


def test_the_interval_may_change_between_starts(settings, make_batch, monkeypatch):
    folders = folders_of(settings)
    spool(folders, *[make_batch(step, samples=2) for step in range(1, 5)])
    killed_run(settings.model_copy(update={"checkpoint_interval": 10}), folders, monkeypatch)
    there = bytes_under(folders.weights)
    killed_run(settings.model_copy(update={"checkpoint_interval": 2}), folders, monkeypatch)
    assert bytes_under(folders.weights) == there
    spool(folders, make_batch(5, samples=2), make_batch(6, samples=2))
    killed_run(settings.model_copy(update={"checkpoint_interval": 2}), folders, monkeypatch)
    assert names(folders.checkpoints) == ["step-000004", "step-000006"]
    assert names(folders.weights) == ["v000004", "v000005", "v000006"]


def test_a_step_is_the_same_the_second_time_whatever_is_in_it(settings, make_batch, monkeypatch, capfd):
    """References, a frozen generator's words, an entropy over drawn positions: all that a step may have."""

    def of_all_kinds(step: int) -> TrainingBatch:
        masked, plain, *others = make_batch(step, samples=4).samples
        reference = [-np.linspace(0.1, 4, one.num_tokens) for one in (masked, plain)]
        compared = [with_reference(one, r, 0.5) for one, r in zip((masked, plain), reference, strict=True)]
        return TrainingBatch.build(step, [*compared, frozen(others[0]), *others[1:]])

    settings = settings.model_copy(
        update={"checkpoint_interval": 10, "full_vocabulary_scores": True, "entropy": 0.5}
    )
    folders = folders_of(settings)
    spool(folders, *[of_all_kinds(step) for step in (1, 2)])
    killed_run(settings, folders, monkeypatch)
    results = results_of(folders)
    folders.result(2).unlink()  # as if it had been killed between weights and result
    capfd.readouterr()
    killed_run(settings, folders, monkeypatch)
    assert "step 2 again: the same bits as version 2" in capfd.readouterr().out
    assert results_of(folders) == results


def test_a_batch_that_is_trained_once_more_and_is_not_finite_now_is_not_to_be_removed(
    settings, make_batch, monkeypatch
):
    """The start would refuse to go on without it; the first time it may be removed."""
    settings = settings.model_copy(update={"checkpoint_interval": 10})
    folders = folders_of(settings)
    spool(folders, make_batch(1, samples=2))
    killed_run(settings, folders, monkeypatch)
    monkeypatch.setattr(train, "train_step", not_finite)
    with pytest.raises(NotFinite, match=r"step 1: a fault\. It was finite when it was trained first"):
        run(settings)


def not_finite(*_: object, **__: object) -> None:
    raise NotFinite("a fault")


def test_a_trainer_killed_while_it_trains_once_more_loses_and_repeats_nothing(
    settings, make_batch, tmp_path, monkeypatch
):
    settings = settings.model_copy(update={"checkpoint_interval": 10, "keep_weights": 2})
    first, batches = folders_of(settings), [make_batch(step, samples=2) for step in (1, 2, 3, 4)]
    spool(first, *batches[:3])
    killed_run(settings, first, monkeypatch)

    def second_life(name: str):
        own = settings.model_copy(
            update={"output_dir": tmp_path / name, "weights_dir": tmp_path / f"{name}-w"}
        )
        shutil.copytree(settings.output_dir, own.output_dir)
        shutil.copytree(settings.weights_dir, own.weights_dir)
        folders = folders_of(own)
        spool(folders, batches[3])
        return own, folders

    undisturbed, expected = second_life("undisturbed")
    with monkeypatch.context() as patch:
        writes = killed_before(10**9, patch)
        run(undisturbed)
    for write in range(random.randrange(12), writes[0], 12):
        killed, folders = second_life(f"killed-{write}")
        with monkeypatch.context() as patch:
            killed_before(write, patch)
            with pytest.raises((Killed, CheckpointException)):
                run(killed)
        there = bytes_under(folders.weights)
        run(killed)
        for name, content in bytes_under(folders.weights).items():
            assert there.get(name, content) == content, f"{name} changed after it was published"
        assert bytes_under(folders.weights) == bytes_under(expected.weights), f"killed before write {write}"
        assert results_of(folders) == results_of(expected), f"killed before write {write}"


def train_on(ranks, settings) -> None:
    train.train(settings, ranks, os.getppid())


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
def test_another_number_of_ranks_trains_once_more_and_goes_on(
    sharding, settings, make_batch, monkeypatch, tmp_path
):
    settings = settings.model_copy(update={"checkpoint_interval": 10, "full_vocabulary_scores": True})
    folders = folders_of(settings)
    spool(folders, *[make_batch(step, samples=4) for step in (1, 2)])
    killed_run(settings, folders, monkeypatch)
    there = [bytes_under(one) for one in (folders.weights, folders.results, folders.scores)]
    spool(folders, make_batch(3, samples=4))
    on_ranks(2, train_on, tmp_path, settings.model_copy(update={"sharding": sharding}))
    assert names(folders.checkpoints) == ["step-000002", "step-000003"]
    for before, folder in zip(there, (folders.weights, folders.results, folders.scores), strict=True):
        after = bytes_under(folder)
        assert all(after.get(name, content) == content for name, content in before.items())
        assert after.keys() - before.keys()
    run(settings)  # and back on one, from whichever bits those were
    assert names(folders.checkpoints) == ["step-000002", "step-000003"]
