"""What users of other systems ran into, and no test elsewhere shows: each with the public report.

tests/README.md maps all reports to tests.
"""

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kept_loss import KeptSet, kept_logprobs
from keptset_settings import ClippedRatioLoss, SequenceProductLoss
from keptset_trainer.losses import loss_function

torch.set_num_threads(1)  # the suites of this repository share few cores

TABLE = Path(__file__).parent / "README.md"


def sampled(
    hidden: Tensor, weight: Tensor, temperature: float, *, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, KeptSet, Tensor]:
    """What an engine does: cut, renormalise, draw. Labels [N], kept sets, processed logprobs [N]."""
    logits = (hidden @ weight.T).double() / temperature
    ordered, order = logits.sort(dim=-1, descending=True)
    if top_k:
        ordered[:, top_k:] = -torch.inf
    probabilities = ordered.softmax(-1)
    ordered[probabilities.cumsum(-1) - probabilities >= top_p] = -torch.inf
    logprobs = torch.full_like(logits, -torch.inf).scatter(1, order, ordered).log_softmax(-1)
    labels = torch.multinomial(logprobs.exp(), 1).squeeze(1)
    rows = [row.isfinite().nonzero().squeeze(1).tolist() for row in logprobs]
    kept = KeptSet.from_rows(rows) if top_p < 1 or top_k else KeptSet.whole_vocabulary(len(rows))
    return labels, kept, logprobs[torch.arange(len(labels)), labels]


def ratios(hidden, weight, labels, kept: KeptSet, temperature: float, rollout: Tensor) -> Tensor:
    heat = torch.full((len(labels),), temperature)
    return (kept_logprobs(hidden, weight, labels, kept, heat).logprobs.double() - rollout).exp()


@pytest.fixture
def head() -> tuple[Tensor, Tensor]:
    """Hidden states [200, 32] and the matrix of a vocabulary of 2048."""
    torch.manual_seed(0)
    return torch.randn(200, 32), torch.randn(2048, 32) * 0.3


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.8, "top_k": 1024}])
def test_ratio_is_1_with_kept_sets_and_the_kept_mass_without(head, cut: dict):
    # trl#6789, verl#6240: top_p 0.9, or top_k 50 on a flat distribution: every ratio off by the kept mass
    hidden, weight = head
    labels, kept, rollout = sampled(hidden, weight, 1.0, **cut)
    assert (ratios(hidden, weight, labels, kept, 1.0, rollout) - 1).abs().max() < 1e-4
    whole = KeptSet.whole_vocabulary(len(labels))
    full = (hidden @ weight.T).double().softmax(-1)
    starts, ends = kept.offsets[:-1].tolist(), kept.offsets[1:].tolist()
    pairs = zip(starts, ends, strict=True)
    mass = torch.stack([full[n, kept.ids[a:b].long()].sum() for n, (a, b) in enumerate(pairs)])
    without = ratios(hidden, weight, labels, whole, 1.0, rollout)
    torch.testing.assert_close(without, mass, atol=1e-4, rtol=1e-4)
    assert mass.max() < 0.95


def test_as_few_ratios_stray_with_kept_sets_as_without_truncation(head):
    # trl#7269: top_p 0.8 and top_k 1024: 51.8 % of the ratios outside [0.9, 1.1], 4 to 7 % without truncation
    hidden, weight = head
    moved = hidden + 0.04 * torch.randn_like(hidden)  # the trainer's arithmetic is not the engine's

    def straying(kept_sets: bool, **cut) -> float:
        labels, kept, rollout = sampled(hidden, weight, 1.0, **cut)
        kept = kept if kept_sets else KeptSet.whole_vocabulary(len(labels))
        found = ratios(moved, weight, labels, kept, 1.0, rollout)
        return float(((found < 0.9) | (found > 1.1)).double().mean())

    untruncated = straying(True)
    assert 0.01 < untruncated < 0.2
    assert straying(True, top_p=0.8, top_k=1024) <= untruncated + 0.05
    assert straying(False, top_p=0.8, top_k=1024) > 0.5


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_first_ratio_is_1_at_any_temperature(head, temperature: float):
    # trl#4159: temperature 0.6, which the trainer forgot: the first ratio was about 2
    hidden, weight = head
    labels, kept, rollout = sampled(hidden, weight, temperature, top_p=0.95)
    assert (ratios(hidden, weight, labels, kept, temperature, rollout) - 1).abs().max() < 1e-4
    forgotten = ratios(hidden, weight, labels, kept, 1.0, rollout)
    assert (forgotten.log().abs().mean()) > 0.1


def test_replay_makes_the_ratio_of_a_long_sequence_1():
    # trl#7120: a sequence-level ratio over 300 tokens: 0.875 ** 300 underflows, its inverse is inf
    tokens, mass = 300, 0.875
    rollout = torch.full((tokens,), -0.5)
    sequence = torch.zeros(tokens, dtype=torch.int64)

    def result(off: float, loss=SequenceProductLoss()):  # noqa: B008
        logprobs = (rollout + off).requires_grad_()
        summed = loss_function(loss)(logprobs, rollout, torch.ones(tokens), sequence, 1)
        summed.total.backward()
        return summed, logprobs.grad

    replayed, gradient = result(0.0)
    assert not replayed.rejected.any()
    assert (gradient == -1).all(), "every weight is 1"
    for off in (math.log(mass), -math.log(mass)):
        for loss in (SequenceProductLoss(), ClippedRatioLoss()):
            summed, gradient = result(off, loss)
            assert torch.isfinite(summed.total)
            assert torch.isfinite(gradient).all()
        assert result(off)[0].rejected.all(), "without replay the guard rejects it"


def test_bounds_hold_where_300_ratios_underflow():
    # trl#7120 once more: what replay does not make 1 stays finite, and is outside the band rather than NaN
    rollout = torch.full((300,), -0.5)
    for off in (-700.0, 700.0):
        leaf = (rollout + off).requires_grad_()
        ends = loss_function(SequenceProductLoss())(
            leaf, rollout, torch.ones(300), torch.zeros(300).long(), 1
        )
        ends.total.backward()
        assert ends.rejected.all()
        assert not leaf.grad.any()


def named_tests() -> list[tuple[str, str]]:
    """(file, test) of every test that the table names."""
    return re.findall(r"`([\w/.-]+\.py)::(\w+)`", TABLE.read_text())


def test_table_of_reports_names_tests_that_exist():
    named, root = named_tests(), TABLE.parents[1]
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (root / file).is_file() or not re.search(rf"def {name}\(", (root / file).read_text())
    ]
    assert not missing


def body_of(file: str, name: str) -> str:
    """The source of a test."""
    text = (TABLE.parents[1] / file).read_text()
    (found,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )
    return "\n".join(text.splitlines()[found.lineno - 1 : found.end_lineno])


def test_every_report_is_told_in_a_test_that_shows_ours_does_right():
    rows = [line.strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("|")]
    reports = [(cells[0].strip(), cells[2]) for cells in rows if len(cells) == 3 and "::" in cells[2]]
    assert len(reports) == 31
    untold = [
        report
        for report, tests in reports
        if not any(
            all(one in body_of(file, name) for one in report.split(", "))
            for file, name in re.findall(r"`([\w/.-]+\.py)::(\w+)`", tests)
        )
    ]
    assert not untold
