"""A stored step is scored again: healthy as it was sampled, and what was changed is found by its token."""

import json
import os

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kept_tokens import KeptTokens
from kept_tokens.messages import TrainingBatch, encode
from keptset_trainer import train
from keptset_trainer.folders import Folders
from keptset_trainer.ranks import Ranks
from keptset_trainer.replay.command import replay


@pytest.fixture
def trained(settings, make_batch, monkeypatch):
    """(batches of steps 1, 2 ...) -> the directories of a trainer that has trained them."""
    wait = train.wait_for_batch
    monkeypatch.setattr(
        train, "wait_for_batch", lambda path, *rest: wait(path, *rest) if path.exists() else None
    )
    monkeypatch.setattr(train, "stop_on_signals", lambda numbers: lambda: False)
    folders = Folders(settings.output_dir, settings.weights_dir)
    folders.create()

    def do(*batches: TrainingBatch) -> Folders:
        for batch in batches:
            folders.batch(batch.step).write_bytes(encode(batch))
        train.train(settings, Ranks(torch.device("cpu")), os.getppid())
        return folders

    return do


@pytest.fixture
def replayed(settings, tmp_path, capsys):
    """(options) -> exit code, what was found, stdout, stderr."""

    def do(*options: object):
        found = tmp_path / "found.json"
        arguments = {
            "--model": settings.model,
            "--output-dir": settings.output_dir,
            "--weights-dir": settings.weights_dir,
            "--device": "cpu",
            "--row-tokens": 64,
            "--json": found,
        }
        found.unlink(missing_ok=True)
        code = replay([str(text) for text in (*(x for pair in arguments.items() for x in pair), *options)])
        return code, json.loads(found.read_bytes()) if found.exists() else None, *capsys.readouterr()

    return do


def of_version(folders: Folders, version: int):
    return AutoModelForCausalLM.from_pretrained(folders.version(version), dtype=torch.float32).eval()


def tampered(batch: TrainingBatch, index: int, **changes: object) -> TrainingBatch:
    """A batch that is well formed, hash and all, with other values in one sample."""
    samples = list(batch.samples)
    samples[index] = msgspec.structs.replace(samples[index], **changes)
    return TrainingBatch.build(batch.step, samples)


def token_with_a_set(batch: TrainingBatch) -> tuple[int, int]:
    """Sample and position of a token whose kept set has more than two ids."""
    for index, sample in enumerate(batch.samples):
        if sample.kept() is not None and (sample.kept().counts > 2).any():
            return index, int(np.flatnonzero(sample.kept().counts > 2)[0])
    raise AssertionError("no such token")


def test_a_step_is_healthy_by_the_weights_that_sampled_it(trained, replayed, make_batch):
    folders = trained(make_batch(1))
    trained(make_batch(2, model=of_version(folders, 1)))
    for step, options in ((2, ()), (1, ("--step", 1))):
        code, found, out, err = replayed(*options)
        assert code == 0, out + err
        assert (found["step"], found["healthy"], found["above"]) == (step, True, 0)
        assert found["sampled_by"] == {str(step - 1): found["tokens"]}
        assert found["tokens"] == sum(found["histogram"].values())
        assert found["tokens"] == sum(n["tokens"] for n in found["by_mask"].values())
        assert max(abs(value) for value in found["quantiles"].values()) < 1e-5
        assert out.endswith("\nhealthy\n")
    # the steps changed the weights, which those of another version show
    code, found, out, _ = replayed("--step", 2, "--weights-version", 0)
    assert (code, found["healthy"]) == (1, False)
    assert found["above"] > 0
    assert "all of them scored by v000000" in out


def test_each_token_is_scored_by_the_version_that_sampled_it(trained, replayed, make_batch):
    folders = trained(make_batch(1))
    old, new = (make_batch(2, model=of_version(folders, version)) for version in (0, 1))
    mixed = [
        msgspec.structs.replace(sample, weight_versions=[(version, 1, sample.num_tokens)])
        for version, batch, part in ((0, old, slice(6)), (1, new, slice(6, 12)))
        for sample in batch.samples[part]
    ]
    trained(TrainingBatch.build(2, mixed))
    code, found, out, _ = replayed()
    assert code == 0, out
    assert set(found["sampled_by"]) == {"0", "1"}


def test_a_changed_logprob_is_the_worst_token(trained, replayed, make_batch):
    batch = make_batch(1)
    index, position = token_with_a_set(batch)
    logprobs = batch.samples[index].arrays().logprobs.copy()
    logprobs[position] -= 0.25
    trained(tampered(batch, index, logprobs=logprobs.tobytes()))
    code, found, out, _ = replayed("--worst", 2)
    assert (code, found["above"]) == (1, 1)
    worst, next_to_it = found["worst"]
    assert (worst["sample"], worst["sample_id"], worst["position"]) == (index, f"1/{index}", position)
    token_id = int(batch.samples[index].arrays().token_ids[position])
    assert (worst["token_id"], worst["kept"]) == (token_id, batch.samples[index].kept().counts[position])
    assert worst["log_ratio"] == pytest.approx(0.25, abs=1e-5)
    assert worst["rollout_logprob"] == pytest.approx(float(logprobs[position]))
    assert abs(next_to_it["log_ratio"]) < 1e-5
    assert "NOT healthy" in out
    assert f"{index} (1/{index})" in out
    # whoever takes that for healthy says so
    assert replayed("--bound", 0.3)[0] == 0
    assert replayed("--allow", 0.5)[0] == 0


def test_an_id_missing_in_a_kept_set_shows_its_token(trained, replayed, make_batch):
    batch = make_batch(1)
    index, position = token_with_a_set(batch)
    sample = batch.samples[index]
    rows = sample.kept().rows()
    rows[position].remove(next(one for one in rows[position] if one != sample.arrays().token_ids[position]))
    ids, counts = KeptTokens.from_rows(rows).to_bytes()
    trained(tampered(batch, index, kept_ids=ids, kept_counts=counts))
    code, found, *_ = replayed("--worst", 1)
    (worst,) = found["worst"]
    assert code == 1
    assert (worst["sample"], worst["position"], worst["kept"]) == (index, position, len(rows[position]))
    assert worst["log_ratio"] > 1e-4  # fewer ids to share the mass with


def test_a_batch_that_was_changed_on_the_disk_is_not_healthy(trained, replayed, make_batch):
    batch = make_batch(1)
    folders = trained(batch)
    other = make_batch(7).samples
    folders.batch(1).write_bytes(encode(TrainingBatch.build(1, other)))
    code, found, out, _ = replayed()
    assert (code, found["above"]) == (1, 0)
    assert "is of another batch" in out
    folders.batch(1).write_bytes(encode(TrainingBatch(1, other, batch.content_hash)))
    assert "its content hash does not fit" in replayed()[2]


def test_what_was_not_kept_is_named_with_the_setting_that_keeps_it(trained, replayed, make_batch, settings):
    assert replayed()[0] == 2
    folders = trained(*(make_batch(step) for step in (1, 2, 3)))
    code, found, _, err = replayed("--step", 1)
    assert (code, found) == (2, None)
    assert "the batch of step 1 is not in" in err
    assert "it has those of steps 2, 3" in err
    assert "trainer.keep_batches = 3 and trainer.keep_weights = 4" in err
    assert "that step was not accepted yet" in replayed("--step", 9)[3]
    code, _, _, err = replayed("--step", 3, "--weights-version", 0)
    assert code == 2
    assert "weights version 0 is not in" in err
    assert "trainer.keep_weights = 4" in err
    # a checkpoint stands in for weights that are gone
    for path in (folders.weights / "v000002").iterdir():
        path.unlink()
    (folders.weights / "v000002").rmdir()
    assert replayed("--step", 3, "--bound", 9)[0] == 0


def test_batches_are_kept_as_long_as_the_settings_say(trained, replayed, make_batch, settings):
    settings.keep_batches, settings.keep_weights = 3, 4
    trained(*(make_batch(step) for step in (1, 2, 3)))
    code, found, *_ = replayed("--step", 1)
    assert (code, found["healthy"]) == (0, True)
