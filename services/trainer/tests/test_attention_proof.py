"""A kernel whose results or gradients are off is left out before a training. On GPUs: test_cuda.py."""

import logging

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import Qwen3Config

from keptset_trainer import attention, attention_proof

MATH, CUDNN = SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION
CONFIG = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64)
CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch):
    kept = [CUDNN, MATH]
    monkeypatch.setattr(attention, "BATCH_KERNELS", kept)
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_exact_stays_and_what_does_not_run_goes(kernels, dtype, caplog):
    with caplog.at_level(logging.WARNING):
        attention_proof.keep_exact_kernels(CONFIG, CPU, dtype)
    assert kernels == [MATH], "cuDNN runs on no CPU"
    assert "CUDNN_ATTENTION attention does not run here and is left out: " in caplog.text


class Off(torch.autograd.Function):
    """The same, with a gradient that is a tenth too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


@pytest.mark.parametrize("fault", [lambda x: x * 1.1, lambda x: x * float("nan"), Off.apply])
@pytest.mark.parametrize("which", ["out", "q", "k", "v"])
def test_a_result_or_gradient_that_is_off_takes_the_kernel_out(kernels, fault, which, monkeypatch, caplog):
    true = attention.batch_attention

    def wrong(q, k, v, *rest):
        given = {"q": q, "k": k, "v": v}
        if which != "out":
            given[which] = fault(given[which])
        out = true(*given.values(), *rest)
        return fault(out) if which == "out" else out

    monkeypatch.setattr(attention, "batch_attention", wrong)
    with caplog.at_level(logging.WARNING):
        attention_proof.keep_exact_kernels(CONFIG, CPU, torch.float32)
    assert kernels == []
    assert "MATH attention is off by" in caplog.text
