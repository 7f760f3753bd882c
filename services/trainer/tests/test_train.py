"""The recipe over files: what it publishes, and that it may be killed before any of its writes."""

import errno
import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kept_tokens.messages import StepResult, decode
from keptset_trainer import durable, weights
from keptset_trainer.disk_errors import DiskRefused
from keptset_trainer.folders import Folders

from .stored_run import bytes_under, folders_of, results_of, run, spool

pytestmark = pytest.mark.usefixtures("leaves_when_there_is_nothing_to_train")


def test_the_first_start_publishes_the_model_itself(settings, tiny_directory):
    folders = folders_of(settings)
    run(settings)
    published = load_file(folders.version(0) / "model.safetensors")
    original = load_file(tiny_directory / "model.safetensors")
    assert published.keys() == original.keys()
    assert "lm_head.weight" not in published, "a tied head is there once"
    assert all(torch.equal(published[name], original[name]) for name in original)
    tokenizer = AutoTokenizer.from_pretrained(folders.version(0))
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_directory).chat_template


def test_a_version_loads_in_transformers_and_agrees_with_its_manifest(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings)
    version = folders.version(1)
    manifest = json.loads((version / "manifest.json").read_bytes())
    assert manifest["version"] == 1
    saved = load_file(version / "model.safetensors")
    assert manifest["tensors"].keys() == saved.keys()
    for name, tensor in saved.items():
        entry = manifest["tensors"][name]
        assert entry["shape"] == list(tensor.shape)
        assert entry["dtype"] == "float32"
        assert entry["blake2b"] == blake2b_128(tensor.numpy().tobytes())
    loaded = AutoModelForCausalLM.from_pretrained(version)
    assert not torch.equal(
        loaded.lm_head.weight,
        load_file(folders.version(0) / "model.safetensors")["model.embed_tokens.weight"],
    )


def blake2b_128(data: bytes) -> str:
    import hashlib

    return hashlib.blake2b(data, digest_size=16).hexdigest()


def test_step_two_is_sampled_from_version_one(settings, make_batch):
    """Rollouts scored by a published version have ratio 1 in the next step."""
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings)
    spool(folders, make_batch(2, model=AutoModelForCausalLM.from_pretrained(folders.version(1)).eval()))
    run(settings)
    assert json.loads(folders.result(2).read_bytes())["metrics"]["ratio/max_abs_log"] < 1e-5


def test_a_restarted_trainer_goes_on_as_if_nothing_had_been(settings, make_batch, tmp_path):
    folders = folders_of(settings)
    for step in (1, 2, 3):
        spool(folders, make_batch(step))
        run(settings)
    other = settings.model_copy(update={"output_dir": tmp_path / "b", "weights_dir": tmp_path / "bw"})
    in_one_go = folders_of(other)
    spool(in_one_go, make_batch(1), make_batch(2), make_batch(3))
    run(other)
    assert bytes_under(folders.weights) == bytes_under(in_one_go.weights)
    assert results_of(folders) == results_of(in_one_go)


def test_old_versions_checkpoints_and_batches_go_but_results_stay(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, *[make_batch(step, samples=2) for step in range(1, 6)])
    run(settings)
    assert sorted(p.name for p in folders.weights.iterdir()) == ["v000003", "v000004", "v000005"]
    assert sorted(p.name for p in folders.checkpoints.iterdir()) == ["step-000004", "step-000005"]
    assert len(list(folders.spool.iterdir())) == 2
    assert len(list(folders.results.iterdir())) == 5


def test_bfloat16_weights_are_trained_and_published_as_such(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings.model_copy(update={"dtype": "bfloat16"}))
    manifest = json.loads((folders.version(1) / "manifest.json").read_bytes())
    assert {entry["dtype"] for entry in manifest["tensors"].values()} == {"bfloat16"}
    assert json.loads(folders.result(1).read_bytes())["metrics"]["ratio/max_abs_log"] < 0.5


def test_nothing_on_disk_is_a_pickle(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings)
    endings = {p.suffix for root in (folders.output, folders.weights) for p in root.rglob("*") if p.is_file()}
    assert endings <= {".safetensors", ".json", ".msgpack", ".jinja"}


def test_a_published_version_that_is_other_than_the_checkpoint_stops_the_start(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings)
    manifest = json.loads((folders.version(1) / "manifest.json").read_bytes())
    manifest["tensors"]["model.norm.weight"]["blake2b"] = "0" * 32
    (folders.version(1) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="holds other weights"):
        run(settings)


def test_a_version_newer_than_every_checkpoint_without_its_batch_stops_the_start(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings)
    durable.remove_directory(folders.checkpoint(1))
    folders.batch(1).unlink()
    said = r"holds version 1, but the newest checkpoint is .*step-000000, and .*step-000001.msgpack is not"
    with pytest.raises(ValueError, match=said):
        run(settings)


def test_weights_of_another_run_stop_the_first_start(settings):
    folders = folders_of(settings)
    folders.version(4).mkdir()
    with pytest.raises(ValueError, match=r"holds 4 and earlier of another run"):
        run(settings)


@pytest.mark.parametrize("name", ["no/such/model", "no-such/model"])
def test_a_model_that_is_nowhere_is_named(settings, name):
    """A path, and what may be a hub's name."""
    folders_of(settings)
    with pytest.raises(ValueError, match=f"trainer.model = '{name}'"):
        run(settings.model_copy(update={"model": name}))


def test_another_model_in_the_same_directory_stops_the_start(settings):
    folders_of(settings)
    run(settings)
    with pytest.raises(ValueError, match=r"was trained from trainer.model .* not from 'elsewhere'"):
        run(settings.model_copy(update={"model": "elsewhere"}))


def test_a_step_that_cannot_be_applied_leaves_no_trace_and_says_how_to_go_on(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings.model_copy(update={"optimizer": settings.optimizer.model_copy(update={"lr": 1e30})}))
    spool(folders, make_batch(2))
    with pytest.raises(ArithmeticError, match=r"step 2: sample .* remove .*step-000002.msgpack"):
        run(settings)
    assert not folders.version(2).exists()
    assert not folders.result(2).exists()


def test_hashing_reads_whole_tensors_in_blocks(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    save_file(
        {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "x.safetensors"
    )
    whole = weights.tensors_of(tmp_path / "x.safetensors")
    monkeypatch.setattr(weights, "BLOCK", 7)
    assert weights.tensors_of(tmp_path / "x.safetensors") == whole
    assert whole["b"]["dtype"] == "bfloat16"
    assert whole["a"]["blake2b"] == blake2b_128(torch.arange(1000.0).numpy().tobytes())


def test_full_vocabulary_scores_lie_beside_the_result(settings, make_batch):
    folders = folders_of(settings)
    batches = [make_batch(step) for step in (1, 2, 3)]
    spool(folders, *batches)
    run(settings.model_copy(update={"full_vocabulary_scores": True}))
    assert [path.name for path in sorted(folders.scores.iterdir())] == [
        "step-000002.msgpack",
        "step-000003.msgpack",
    ]
    result = decode(folders.score(3).read_bytes(), StepResult)
    assert result.step == 3
    for sample, scores in zip(batches[2].samples, result.full_logprobs, strict=True):
        found, mask = np.frombuffer(scores, "<f4"), sample.arrays().loss_mask
        assert len(found) == sample.num_tokens
        assert not found[~mask].any()
        assert (found[mask] < 0).all()


def test_without_the_setting_there_are_no_scores(settings, make_batch):
    folders = folders_of(settings)
    spool(folders, make_batch(1))
    run(settings)
    assert list(folders.scores.iterdir()) == []


WRITES = {
    "checkpoint": ("its checkpoint", "checkpoints"),
    "weights": ("its weights", "weights"),
    "result": ("its result", "results"),
}


@pytest.mark.parametrize("which", WRITES)
def test_a_full_disk_is_named_and_the_step_is_made_up_for(which, settings, make_batch, tmp_path, monkeypatch):
    """The kernel refuses (a bound on the size of files); for what is small opening it is made to fail."""
    folders, undisturbed = folders_of(settings), settings.model_copy(deep=True)
    undisturbed.output_dir, undisturbed.weights_dir = tmp_path / "other", tmp_path / "other-weights"
    for one in (settings, undisturbed):
        spool(folders_of(one), make_batch(1))
    run(settings)
    before = bytes_under(folders.weights)
    for one in (settings, undisturbed):
        spool(folders_of(one), make_batch(2))
    what, where = WRITES[which]
    with monkeypatch.context() as patch, no_file_larger_than(4096 if which == "checkpoint" else None):
        if which != "checkpoint":
            refuse_files_of(patch, getattr(folders, where))
        with pytest.raises(
            DiskRefused, match=rf"step 2: {what} cannot be written to .*{where}.*: the disk is full"
        ):
            run(settings)
    after = bytes_under(folders.weights)
    assert {name: after.get(name) for name in before} == before, "what was published is there, unchanged"
    assert folders.batch(2).exists()
    run(settings)
    run(undisturbed)
    other = Folders(undisturbed.output_dir, undisturbed.weights_dir)
    assert results_of(folders) == results_of(other)
    assert bytes_under(folders.version(2)) == bytes_under(other.version(2))


@contextmanager
def no_file_larger_than(size: int | None):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse_files_of(patch, folder: Path) -> None:
    """ENOSPC for every file that is opened for writing below a folder."""
    opened = Path.open

    def full(path, mode="r", *rest, **more):
        if "w" in mode and folder in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, *rest, **more)

    patch.setattr(Path, "open", full)


def test_a_schedule_goes_on_where_it_was(settings, make_batch, tmp_path):
    """Its place is the step's number: a run that stops after each step trains as one that does not."""
    schedule = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 1, "decay_steps": 4, "min_lr": 1e-4}
    outcomes = []
    for name, stops in (("through", [4]), ("stopping", [1, 2, 3, 4])):
        update = {
            "output_dir": tmp_path / name,
            "weights_dir": tmp_path / f"{name}-weights",
            "optimizer": type(settings.optimizer)(**schedule),
        }
        own = settings.model_copy(update=update)
        folders, done = folders_of(own), 0
        for stop in stops:
            spool(folders, *(make_batch(step) for step in range(done + 1, stop + 1)))
            run(own)
            done = stop
        outcomes.append((results_of(folders), bytes_under(folders.version(4))))
    assert outcomes[0] == outcomes[1]
    rates = [result["metrics"]["lr"] for result in outcomes[0][0].values()]
    assert rates == pytest.approx([1e-3, 1e-3, 7.75e-4, 3.25e-4])
