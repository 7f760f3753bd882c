"""Two ranks (gloo, on the CPU) make of a batch what one makes of it, and go on where the other number was."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kept_tokens import KeptTokens
from kept_tokens.messages import TrainingBatch
from keptset_trainer import checkpoint
from keptset_trainer import ranks as ranks_module
from keptset_trainer.full_scores import FullScores
from keptset_trainer.model import Policy, load_policy
from keptset_trainer.optimizer import adamw
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks, join, leave
from keptset_trainer.train_step import Abandoned, NotFinite

from .conftest import VOCAB_SIZE
from .one_step import one_step
from .test_objectives import frozen, with_reference

PATIENCE = 200.0


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

    def __init__(self, ranks: Ranks, directory: Path, sharding: Any, **options: Any) -> None:
        """`sharding`: of two ranks; one has nothing to share. `eps` is far above what rounding leaves of a
        gradient that is 0, whose sign AdamW would make a whole step of.
        """
        self.ranks = ranks
        self.policy = load_policy(str(directory), ranks.device, "float32", options.pop("attention", "auto"))
        options.pop("change", lambda policy: None)(self.policy)
        options = {"checkpointing": "off", "compiled": False} | options
        options["sharding"] = sharding if ranks.size > 1 else "none"
        self.scorer, self.weights = prepare(self.policy, ranks, **options)
        self.optimizer = adamw(self.weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.01)

    def step(
        self,
        batch: Any,
        told_to_stop: Callable[[], bool] = lambda: False,
        full_scores: FullScores | None = None,
    ) -> dict[str, float]:
        options = {"max_grad_norm": 0.5, "told_to_stop": told_to_stop, "full_scores": full_scores}
        return one_step(self.scorer, self.weights, self.optimizer, self.ranks, batch.samples, **options)

    def whole(self) -> dict[str, np.ndarray]:
        """Weights as arrays, which go through a pipe."""
        return {name: self.weights.whole(name).numpy().copy() for name in self.weights.named}

    def save(self, path: Path, tokenizer_from: Path) -> None:
        checkpoint.save(
            path, self.policy.model, self.weights, self.optimizer, self.ranks, tokenizer_from, {"step": 0}
        )

    def restore(self, path: Path) -> None:
        checkpoint.restore(path, self.weights, self.optimizer, self.ranks)


def two_steps(ranks: Ranks, directory: Path, sharding: str, batches: list[Any], folder: Path) -> Any:
    """Metrics of two steps and the weights after them; a checkpoint after the first."""
    trained = Trained(ranks, directory, sharding)
    metrics = [trained.step(batches[0])]
    trained.save(folder / f"saved-by-{ranks.size}", directory)
    metrics.append(trained.step(batches[1]))
    return metrics, trained.whole()


def second_step(ranks: Ranks, directory: Path, sharding: str, batches: list[Any], saved: Path) -> Any:
    trained = Trained(ranks, directory, sharding)
    trained.restore(saved)
    return [trained.step(batches[1])], trained.whole()


def assert_same(one: Any, other: Any, metric: str = "") -> None:
    """Metrics and weights agree to float32 rounding."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=2e-6), metric
    for name, values in one[1].items():
        assert np.allclose(values, other[1][name], rtol=0, atol=2e-5), name


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
def test_two_ranks_do_what_one_does_and_read_each_others_checkpoints(
    tiny_directory, make_batch, tmp_path, sharding
):
    batches = [make_batch(1, samples=9), make_batch(2, samples=1)]  # one sample: a rank has nothing to do
    alone = two_steps(Ranks(torch.device("cpu")), tiny_directory, sharding, batches, tmp_path)
    first, second = on_ranks(2, two_steps, tmp_path, tiny_directory, sharding, batches, tmp_path)
    assert first[0] == second[0]
    assert all(np.array_equal(first[1][name], second[1][name]) for name in first[1])
    assert_same(first, alone)

    # published, the same; and each number of ranks goes on from what the other saved, as if it were its own
    by_one, by_two = (load_file(tmp_path / f"saved-by-{n}" / "model.safetensors") for n in (1, 2))
    assert by_one.keys() == by_two.keys()
    assert all(torch.allclose(by_one[name], by_two[name], rtol=0, atol=2e-5) for name in by_one)
    cpu, saved = Ranks(torch.device("cpu")), [tmp_path / f"saved-by-{n}" for n in (1, 2)]
    resumed = second_step(cpu, tiny_directory, sharding, batches, saved[1])
    assert_same(([first[0][1]], first[1]), resumed)
    resharded = on_ranks(2, second_step, tmp_path, tiny_directory, sharding, batches, saved[0])[0]
    assert_same(([alone[0][1]], alone[1]), resharded)


def test_a_resumed_rank_makes_the_same_step_to_the_bit(tiny_directory, make_batch, tmp_path):
    batches = [make_batch(1), make_batch(2)]
    cpu = Ranks(torch.device("cpu"))
    metrics, after = two_steps(cpu, tiny_directory, "none", batches, tmp_path)
    again, resumed = second_step(cpu, tiny_directory, "none", batches, tmp_path / "saved-by-1")
    assert again == metrics[1:]
    assert all(np.array_equal(after[name], resumed[name]) for name in after)


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
def test_what_is_too_small_for_all_ranks_keeps_its_moments(tiny_directory, make_batch, tmp_path, sharding):
    """A parameter of one row, of which the second rank has nothing."""
    batch = make_batch(1, samples=9)
    saved, _ = on_ranks(2, moments_of_one_row, tmp_path, tiny_directory, sharding, batch, tmp_path / "saved")
    before, after = saved
    assert before["step"] == 1
    assert any(before["exp_avg"])
    assert after == before


class Listening(Ranks):
    """A rank that leaves a file when it has heard three times that the first one is busy."""

    folder: Path
    words = 0

    def from_first(self, number: int) -> int:
        word = super().from_first(number)
        if word == ranks_module.BUSY:
            type(self).words += 1
            if self.words == 3:
                (self.folder / "heard").touch()
        return word


def first_is_long_at_it(ranks: Ranks, folder: Path) -> list[str]:
    """What becomes of two pieces of work, of which the first ends when others have heard of it."""
    Listening.folder, ranks_module.SECONDS_BETWEEN_WORDS = folder, 0.01
    done: list[str] = []

    def writes() -> None:
        while not (folder / "heard").exists():
            time.sleep(0.01)
        done.append("written")

    def fails() -> None:
        raise OSError("the disk is full")

    listening = ranks if ranks.is_first else Listening(**vars(ranks))
    listening.first_alone(writes)
    assert ranks.gathered(ranks.rank) == [0, 1], "all are where they should be"
    try:
        listening.first_alone(fails)
    except (OSError, RuntimeError) as error:
        done.append(str(error))
    return done


def test_the_first_rank_gives_signs_of_life_while_it_works_alone(tmp_path):
    """A checkpoint on a slow disk takes longer than a rank waits for one that is silent."""
    first, second = on_ranks(2, first_is_long_at_it, tmp_path, tmp_path)
    assert first == ["written", "the disk is full"]
    assert second == ["rank 1: rank 0 failed; its log says why"]


def moments_of_one_row(ranks: Ranks, directory: Path, sharding: str, batch: Any, path: Path) -> Any:
    """What the optimiser knows of it on this rank, before a checkpoint and after its restart."""
    found = []
    for trains in (True, False):
        trained = Trained(ranks, directory, sharding, change=shifted)
        if trains:
            trained.step(batch)
            trained.save(path, directory)
        else:
            trained.restore(path)
        known = trained.optimizer.state.get(trained.weights.named["model.norm.shift"], {})
        found.append({name: values.detach().flatten().tolist() for name, values in known.items()})
        found[-1]["step"] = sum(found[-1].get("step", []))
    return found


def shifted(policy: Policy) -> None:
    """The last norm adds what it learns."""
    norm = policy.model.model.norm
    norm.shift = nn.Parameter(torch.zeros(1, norm.weight.shape[0]))
    norm.register_forward_hook(lambda module, arguments, out: out + module.shift[0])


def compared(ranks: Ranks, directory: Path, sharding: str, batches: list[Any]) -> Any:
    """Metrics, weights and the scores over the whole vocabulary of steps with references."""
    trained, metrics, scores = Trained(ranks, directory, sharding), [], []
    for batch in batches:
        full_scores = FullScores()
        metrics.append(trained.step(batch, full_scores=full_scores))
        scores.append(full_scores.of_samples(batch.samples, ranks))
    return metrics, trained.whole(), scores


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
def test_two_ranks_give_the_full_scores_of_one_and_compare_with_them(
    tiny_directory, make_batch, tmp_path, sharding
):
    """Truncating samples with references beside a frozen generator's; one sample, so that a rank has none."""

    def mixed(step: int, samples: int) -> TrainingBatch:
        sampled = make_batch(step, samples=samples).samples
        references = [-np.linspace(0.1, 4, sample.num_tokens) for sample in sampled]
        compared = [with_reference(s, r, 0.5) for s, r in zip(sampled, references, strict=True)]
        said = [frozen(sample) for sample in make_batch(9, samples=3).samples] if samples > 1 else []
        return TrainingBatch.build(step, [*compared[:2], *said, *compared[2:]])

    batches = [mixed(1, 7), mixed(2, 1)]
    assert any(sample.must_have_masks for sample in batches[0].samples)
    alone = compared(Ranks(torch.device("cpu")), tiny_directory, sharding, batches)
    first, second = on_ranks(2, compared, tmp_path, tiny_directory, sharding, batches)
    assert second[2] == [[], []], "the first rank alone has the scores, and of all samples"
    assert_same(first, alone)
    assert "reference/kl_mean" in first[0][0]
    for batch, mine, theirs in zip(batches, first[2], alone[2], strict=True):
        for sample, one, other in zip(batch.samples, mine, theirs, strict=True):
            scored = np.frombuffer(one, "<f4")
            np.testing.assert_allclose(scored, np.frombuffer(other, "<f4"), atol=2e-5)
            assert (scored[sample.arrays().loss_mask] < 0).all()
            assert not scored[~sample.arrays().loss_mask].any()


def trained_once(ranks: Ranks, directory: Path, sharding: str, batch: Any, scored: bool) -> Any:
    trained = Trained(ranks, directory, sharding)
    return [trained.step(batch, full_scores=FullScores() if scored else None)["loss"]], trained.whole()


def test_two_ranks_compare_as_the_untruncated_algorithm_does_where_nothing_is_cut(
    tiny_directory, make_batch, tmp_path
):
    """Kept sets of the whole vocabulary, compared by two ranks; none, compared with the rollout's by one."""
    by_trainer, by_rollout = [], []
    for sample in (s for s in make_batch(1, samples=12).samples if not s.must_have_masks):
        arrays = sample.arrays()
        reference = -np.linspace(0.1, 4, sample.num_tokens)
        rows = [list(range(VOCAB_SIZE)) if trained else [] for trained in arrays.loss_mask]
        by_trainer.append(with_reference(sample, reference, 0.7, kept=KeptTokens.from_rows(rows)))
        advantages = arrays.advantages + 0.7 * arrays.loss_mask * (reference - arrays.logprobs)
        by_rollout.append(with_reference(sample, reference, 0.0, advantages=advantages))
    whole, none = TrainingBatch.build(1, by_trainer), TrainingBatch.build(1, by_rollout)
    plain = trained_once(Ranks(torch.device("cpu")), tiny_directory, "none", none, False)
    for found in on_ranks(2, trained_once, tmp_path, tiny_directory, "full", whole, True):
        assert_same(found, plain)
    unchanged = Trained(Ranks(torch.device("cpu")), tiny_directory, "none").whole()
    assert max(np.abs(plain[1][name] - unchanged[name]).max() for name in unchanged) > 1e-4


def stopped_and_broken(
    ranks: Ranks, directory: Path, sharding: str, good: Any, bad: Any
) -> tuple[str, bool, bool]:
    trained = Trained(ranks, directory, sharding)
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


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
def test_two_ranks_stop_together_and_blame_the_same_sample(tiny_directory, make_batch, tmp_path, sharding):
    good, samples = make_batch(1, samples=6), list(make_batch(2, samples=6).samples)
    logprobs = samples[4].arrays().logprobs.copy()
    position = int(samples[4].arrays().loss_mask.nonzero()[0][1])
    logprobs[position] = -2000
    samples[4] = msgspec.structs.replace(samples[4], logprobs=logprobs.astype("<f4").tobytes())
    bad = TrainingBatch.build(2, samples)
    answers = on_ranks(2, stopped_and_broken, tmp_path, tiny_directory, sharding, good, bad)
    assert answers[0] == answers[1]
    said, abandoned, unchanged = answers[0]
    assert f"sample 4 (id '2/4') at position {position}" in said
    assert abandoned
    assert unchanged
