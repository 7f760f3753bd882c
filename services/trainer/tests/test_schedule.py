"""The learning rate as a function of the step; it is set anew each step, and no checkpoint holds it."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from keptset_settings import OptimizerSettings
from keptset_trainer.schedule import learning_rate


def rates(steps: int, **settings) -> list[float]:
    return [learning_rate(step, OptimizerSettings(**settings)) for step in range(1, steps + 1)]


def test_constant_is_constant():
    assert rates(5, lr=2e-6) == [2e-6] * 5
    assert rates(5, lr=1.0, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_it_falls_to_the_lowest_after_the_last_step():
    settings = {"lr": 1.0, "warmup_steps": 2, "decay_steps": 6, "min_lr": 0.2}
    linear = rates(8, schedule="linear", **settings)
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = rates(8, schedule="cosine", **settings)
    assert cosine == pytest.approx([0.5, 1.0, 1.0, 0.6 + 0.4 * math.sqrt(0.5), 0.6, cosine[5], 0.2, 0.2])
    assert cosine[3] + cosine[5] == pytest.approx(1.2)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_it_is_what_torchs_schedulers_give(schedule: str, warmup: int):
    steps, lowest = 12, 0.1
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    after = steps - warmup
    falling = (
        LinearLR(optimizer, 1.0, lowest, after)
        if schedule == "linear"
        else CosineAnnealingLR(optimizer, after, eta_min=lowest)
    )
    scheduler = falling
    if warmup:
        rising = LinearLR(optimizer, 1 / warmup, 1.0, max(1, warmup - 1))
        scheduler = SequentialLR(optimizer, [rising, falling], [warmup])
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = rates(steps, lr=1.0, schedule=schedule, warmup_steps=warmup, decay_steps=steps, min_lr=lowest)
    assert ours == pytest.approx(theirs)


@given(
    schedule=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(0, 50),
    after=st.integers(1, 50),
    lr=st.floats(1e-9, 1.0),
    share=st.floats(0, 1),
)
def test_it_rises_then_falls_and_no_step_within_does_nothing(schedule, warmup, after, lr, share):
    found = rates(
        warmup + after + 5, lr=lr, schedule=schedule, warmup_steps=warmup,
        decay_steps=warmup + after, min_lr=lr * share,
    )  # fmt: skip
    assert all(a < b for a, b in pairwise(found[:warmup]))
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(found[warmup:]))
    assert max(found) == pytest.approx(lr)
    assert min(found[: warmup + after]) > 0
    assert found[warmup + after :] == pytest.approx([lr * share] * 5)
