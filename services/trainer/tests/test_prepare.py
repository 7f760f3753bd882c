"""However a policy is prepared, compiled, checkpointed, sharded or in half precision, it is the same one."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from kept_tokens.messages import TrainingBatch
from keptset_trainer.attention import VARLEN
from keptset_trainer.master_weights import MasterCopies
from keptset_trainer.model import load_policy
from keptset_trainer.optimizer import adamw
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks

from .one_step import one_step

CPU = Ranks(torch.device("cpu"))


@pytest.fixture(autouse=True)
def leave_the_group_of_one():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(
    directory: Path,
    batch: TrainingBatch,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    lr: float = 1e-3,
    steps: int = 1,
    row_tokens: int = 64,
    **options: Any,
) -> tuple[Any, dict[str, float], dict[str, torch.Tensor]]:
    """Weights, metrics of the last step and the whole weights after it."""
    policy = load_policy(str(directory), CPU.device, dtype, attention)
    scorer, weights = prepare(policy, CPU, **({"checkpointing": "off", "compiled": False} | options))
    optimizer = adamw(weights, lr=lr, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    for _ in range(steps):
        result = one_step(scorer, weights, optimizer, CPU, batch.samples, row_tokens=row_tokens)
    return weights, result, {name: weights.whole(name).clone() for name in weights.named}


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "varlen"},
        {"attention": "varlen", "checkpointing": "full", "sharding": "full"},
        {"checkpointing": "selective"},
        {"attention": "varlen", "checkpointing": "selective", "compiled": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_step_is_the_same(tiny_directory, make_batch, monkeypatch, options):
    # what is compiled is the same Python; code of inductor's would take a minute on a CPU
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    batch = make_batch(1, samples=6)
    _, plain, plain_weights = trained(tiny_directory, batch)
    _, metrics, whole = trained(tiny_directory, batch, **options)
    assert metrics == pytest.approx(plain, rel=1e-4, abs=2e-6)
    assert all(torch.allclose(whole[name], plain_weights[name], atol=1e-5) for name in plain_weights)


def test_compiled_blocks_are_compiled_and_checkpointed_ones_run_twice(
    tiny_directory, make_batch, monkeypatch
):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward) or forward)
    policy = load_policy(str(tiny_directory), CPU.device, "float32", "varlen")
    assert policy.model.config._attn_implementation == VARLEN
    prepare(policy, CPU, checkpointing="off", compiled=True)
    assert len(compiled) == len(policy.blocks) == 2


def test_small_steps_add_up_in_float32_that_half_precision_would_lose(tiny_directory, make_batch):
    batch = make_batch(1, samples=2)
    _, _, before = trained(tiny_directory, batch, dtype="bfloat16", lr=1e-6)
    weights, _, after = trained(tiny_directory, batch, dtype="bfloat16", lr=1e-6, steps=30)
    assert isinstance(weights, MasterCopies)
    assert {values.dtype for values in after.values()} == {torch.bfloat16}
    moved = sum(int((after[name] != before[name]).sum()) for name in after)
    assert moved > 50
    for name, master in weights.named.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), after[name])


def test_half_precision_is_close_and_rows_add_up(tiny_directory, make_batch):
    batch = make_batch(1, samples=6)
    _, plain, _ = trained(tiny_directory, batch)
    for row_tokens in (24, 256):
        half = trained(tiny_directory, batch, dtype="bfloat16", attention="varlen", row_tokens=row_tokens)
        assert half[1]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.05)
        assert half[1]["entropy/full"] == pytest.approx(plain["entropy/full"], rel=0.02)
        assert np.isfinite(half[1]["loss"])


def test_a_model_in_float16_is_refused_where_it_would_be_trained_as_it_is_stored(tiny_directory, tmp_path):
    """1e5 loss tokens, and a fifth of its gradient is rounding; 1e6, and most of it is."""
    AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'trainer\.dtype = "auto": .* float16, .* set trainer\.dtype = "bf'):
        load_policy(str(tmp_path), torch.device("cuda"), "auto")
    for device, dtype in (("cpu", "auto"), ("cpu", "bfloat16")):
        assert load_policy(str(tmp_path), torch.device(device), dtype).head.dtype != torch.float16


def test_a_model_that_is_not_there_is_named_as_the_setting_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.model = .*nowhere.*: no such directory; name a model's"):
        load_policy(str(tmp_path / "nowhere"), torch.device("cpu"), "float32")
