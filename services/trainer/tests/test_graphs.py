"""A body that is recorded for layouts of rows gives what the body gives, whatever was recorded before."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_tokens.messages import TrainingBatch
from keptset_trainer import graphs
from keptset_trainer.graphs import BodyGraphs, done_again
from keptset_trainer.layout import SMALLEST, Layout, filled
from keptset_trainer.micro_batch import MicroBatch
from keptset_trainer.model import load_policy
from keptset_trainer.optimizer import adamw
from keptset_trainer.packing import empty_row, pack
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks

from .one_step import one_step

CPU = Ranks(torch.device("cpu"))


def row_of(lengths: list[int]) -> MicroBatch:
    """Of sequences in which nothing is trained."""
    borders = torch.tensor([0, *lengths]).cumsum(0)
    return replace(
        empty_row(),
        token_ids=torch.arange(sum(lengths)) + 7,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        borders=borders,
        samples=torch.arange(len(lengths)),
        longest=max(lengths),
    )


@given(st.lists(st.integers(1, 700), min_size=1, max_size=40))
@settings(max_examples=200)
def test_a_row_is_filled_up_to_a_layout_and_nothing_of_it_changes(lengths):
    row = row_of(lengths)
    layout = Layout.around(row)
    full = filled(row, layout)
    assert Layout.exactly(full) == layout
    assert layout.is_batch == (len(set(lengths)) == 1 and sum(lengths) == layout.tokens)
    assert layout.tokens - sum(lengths) < max(SMALLEST, sum(lengths) / 4)
    sizes = full.borders.diff()
    assert sizes[: len(lengths)].tolist() == lengths
    assert int(full.borders[-1]) == layout.tokens == len(full.positions)
    assert int(sizes.max()) <= layout.longest <= layout.tokens
    assert torch.equal(full.token_ids[: sum(lengths)], row.token_ids)
    assert set(full.token_ids[sum(lengths) :].tolist()) <= {7}
    again = torch.cat([torch.arange(int(size)) for size in sizes])
    assert torch.equal(full.positions, again)
    assert torch.equal(full.samples, row.samples)


def test_there_are_few_layouts():
    generator = np.random.default_rng(0)
    rows = [generator.integers(1, 300, generator.integers(1, 8)).tolist() for _ in range(500)]
    assert len({Layout.around(row_of(lengths)) for lengths in rows}) < 60


def trained(
    directory: Any,
    batch: TrainingBatch,
    record: Callable[..., Any] | None,
    checkpointing: Any,
    steps: int = 3,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], Any]:
    """Metrics of some steps on the same batch, in several rows, and the weights after them."""
    policy = load_policy(str(directory), CPU.device, "bfloat16", "varlen")
    scorer, weights = prepare(policy, CPU, checkpointing=checkpointing, compiled=False)
    if record is not None:
        scorer.graphs = BodyGraphs(policy, record, strict=True)
    optimizer = adamw(weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    results = []
    for _ in range(3):
        results.append(one_step(scorer, weights, optimizer, CPU, batch.samples))
    return results, {name: weights.whole(name).clone() for name in weights.named}, scorer.graphs


@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_recorded_steps_are_the_steps(tiny_directory, make_batch, checkpointing):
    batch = make_batch(1)
    plain, plain_weights, _ = trained(tiny_directory, batch, None, checkpointing)
    metrics, weights, recorded = trained(tiny_directory, batch, done_again, checkpointing)
    assert len(recorded.recorded) >= 1
    assert len(pack(batch.samples, 64)) > len(recorded.recorded), "no layout had two rows"
    for mine, theirs in zip(metrics, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-2, abs=1e-3)
    assert all(torch.allclose(weights[name], plain_weights[name], atol=4e-3) for name in weights)


def test_a_recording_that_fails_is_told_once_and_done_without(tiny_directory, make_batch, caplog):
    def fails(work: graphs.Work) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    policy = load_policy(str(tiny_directory), CPU.device, "bfloat16", "varlen")
    body = BodyGraphs(policy, fails)
    row = body.arranged(pack(make_batch(1).samples, 64)[0])
    first = body.hidden(row)
    assert all(torch.equal(body.hidden(row), first) for _ in range(3))
    assert caplog.text.count("rows of Layout(tokens=128") == 1
    strict = BodyGraphs(policy, fails, strict=True)
    strict.hidden(row)
    with pytest.raises(RuntimeError, match="not permitted"):
        strict.hidden(row)


def test_graphs_are_refused_where_nothing_can_be_recorded(tiny_directory):
    policy = load_policy(str(tiny_directory), CPU.device, "bfloat16", "varlen")
    with pytest.raises(
        ValueError, match=r'trainer.cuda_graphs = "on" needs trainer.device = "cuda".*set it to "auto"'
    ):
        prepare(policy, CPU, checkpointing="off", compiled=False, graphs="on")
    scorer, _ = prepare(policy, CPU, checkpointing="off", compiled=False, graphs="auto")
    assert scorer.graphs is None
