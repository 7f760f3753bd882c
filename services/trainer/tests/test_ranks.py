"""Two ranks (gloo, on the CPU) make of a batch what one makes of it, and go on where the other number was."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kept_tokens.messages import TrainingBatch
from keptset_settings import ClippedRatioLoss
from keptset_trainer import checkpoint
from keptset_trainer.losses import loss_function
from keptset_trainer.model import load_policy
from keptset_trainer.optimizer import adamw
from keptset_trainer.packing import pack
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks, join, leave
from keptset_trainer.train_step import Abandoned, NotFinite, train_step

PATIENCE = 100.0


def on_ranks(size: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(ranks, *arguments)` returns on each of `size` ranks, processes forked from this one."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def one(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        torch.set_num_threads(1)
        try:
            answer = work(join("cpu", f"file://{folder}/rendezvous-{work.__name__}"), *arguments)
            leave()
        except BaseException:
            answer = traceback.format_exc()
        pipes[rank][1].send(answer)

    processes = [context.Process(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    answers = []
    for reader, _ in pipes:
        assert reader.poll(PATIENCE), f"a rank did not answer within {PATIENCE} s"
        answers.append(reader.recv())
    for process in processes:
        process.join(PATIENCE)
    failures = [answer for answer in answers if isinstance(answer, str)]
    assert not failures, "\n".join(failures)
    return answers


class Trained:
    """A policy, its weights and optimiser on this rank; steps are made one after the other."""

    def __init__(self, ranks: Ranks, directory: Path, **options: Any) -> None:
        self.ranks = ranks
        self.policy = load_policy(str(directory), ranks.device, "float32", options.pop("attention", "auto"))
        options = {"checkpointing": "off", "compiled": False} | options
        self.scorer, self.weights = prepare(self.policy, ranks, **options)
        self.optimizer = adamw(self.weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def step(self, batch: Any, told_to_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        metrics, grad_norm = train_step(
            self.scorer,
            self.weights,
            self.optimizer,
            self.ranks,
            batch.samples,
            pack(batch.samples, 64, self.ranks.rank, self.ranks.size),
            loss_function(ClippedRatioLoss()),
            max_grad_norm=0.5,
            entropy="full",
            ignore_masks=False,
            told_to_stop=told_to_stop,
        )
        return metrics.result(grad_norm=grad_norm, lr=1e-3, seconds=0.0, ignored_masks=False)

    def whole(self) -> dict[str, np.ndarray]:
        """Weights as arrays, which go through a pipe."""
        return {name: self.weights.whole(name).numpy().copy() for name in self.weights.named}

    def save(self, path: Path, tokenizer_from: Path) -> None:
        checkpoint.save(
            path, self.policy.model, self.weights, self.optimizer, self.ranks, tokenizer_from, {"step": 0}
        )

    def restore(self, path: Path) -> None:
        checkpoint.restore(path, self.weights, self.optimizer, self.ranks)


def two_steps(ranks: Ranks, directory: Path, batches: list[Any], folder: Path) -> Any:
    """Metrics of two steps and the weights after them; a checkpoint after the first."""
    trained = Trained(ranks, directory)
    metrics = [trained.step(batches[0])]
    trained.save(folder / f"saved-by-{ranks.size}", directory)
    metrics.append(trained.step(batches[1]))
    return metrics, trained.whole()


def second_step(ranks: Ranks, directory: Path, batches: list[Any], saved: Path) -> Any:
    trained = Trained(ranks, directory)
    trained.restore(saved)
    return [trained.step(batches[1])], trained.whole()


def assert_same(one: Any, other: Any, metric: str = "") -> None:
    """Metrics and weights agree to float32 rounding."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=2e-6), metric
    for name, values in one[1].items():
        # AdamW divides by the root of the second moment: where that is 0 but for rounding, so is the step
        assert np.allclose(values, other[1][name], rtol=0, atol=2e-5), name


def test_two_ranks_do_what_one_does_and_read_each_others_checkpoints(tiny_directory, make_batch, tmp_path):
    batches = [make_batch(1, samples=9), make_batch(2, samples=1)]  # one sample: a rank has nothing to do
    alone = two_steps(Ranks(torch.device("cpu")), tiny_directory, batches, tmp_path)
    first, second = on_ranks(2, two_steps, tmp_path, tiny_directory, batches, tmp_path)
    assert first[0] == second[0]
    assert all(np.array_equal(first[1][name], second[1][name]) for name in first[1])
    assert_same(first, alone)

    # published, the same; and each number of ranks goes on from what the other saved, as if it were its own
    by_one, by_two = (load_file(tmp_path / f"saved-by-{n}" / "model.safetensors") for n in (1, 2))
    assert by_one.keys() == by_two.keys()
    assert all(torch.allclose(by_one[name], by_two[name], rtol=0, atol=2e-5) for name in by_one)
    resumed = second_step(Ranks(torch.device("cpu")), tiny_directory, batches, tmp_path / "saved-by-2")
    assert_same(([first[0][1]], first[1]), resumed)
    resharded = on_ranks(2, second_step, tmp_path, tiny_directory, batches, tmp_path / "saved-by-1")[0]
    assert_same(([alone[0][1]], alone[1]), resharded)


def test_a_resumed_rank_makes_the_same_step_to_the_bit(tiny_directory, make_batch, tmp_path):
    batches = [make_batch(1), make_batch(2)]
    cpu = Ranks(torch.device("cpu"))
    metrics, after = two_steps(cpu, tiny_directory, batches, tmp_path)
    again, resumed = second_step(cpu, tiny_directory, batches, tmp_path / "saved-by-1")
    assert again == metrics[1:]
    assert all(np.array_equal(after[name], resumed[name]) for name in after)


def stopped_and_broken(ranks: Ranks, directory: Path, good: Any, bad: Any) -> tuple[str, bool, bool]:
    trained = Trained(ranks, directory)
    before = trained.whole()
    abandoned = False
    try:
        trained.step(good, told_to_stop=lambda: ranks.is_first)
    except Abandoned:
        abandoned = True
    try:
        trained.step(bad)
    except NotFinite as error:
        said = str(error)
    after = trained.whole()
    return said, abandoned, all(np.array_equal(after[name], before[name]) for name in before)


def test_two_ranks_stop_together_and_blame_the_same_sample(tiny_directory, make_batch, tmp_path):
    good, samples = make_batch(1, samples=6), list(make_batch(2, samples=6).samples)
    logprobs = samples[4].arrays().logprobs.copy()
    position = int(samples[4].arrays().loss_mask.nonzero()[0][1])
    logprobs[position] = -2000
    samples[4] = msgspec.structs.replace(samples[4], logprobs=logprobs.astype("<f4").tobytes())
    bad = TrainingBatch.build(2, samples)
    answers = on_ranks(2, stopped_and_broken, tmp_path, tiny_directory, good, bad)
    assert answers[0] == answers[1]
    said, abandoned, unchanged = answers[0]
    assert f"sample 4 (id '2/4') at position {position}" in said
    assert abandoned
    assert unchanged
