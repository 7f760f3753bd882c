"""Which kernels of torch for equally long sequences give what the kernel for packed rows gives."""

import logging

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import PretrainedConfig

from . import attention

log = logging.getLogger(__name__)

ROWS = ((2, 128), (3, 100))
"""Sequences, and tokens of each; not all kernels take a length that fills no tile."""
BOUND = 1e-2
"""Relative, by norm: two roundings to bfloat16 differ by 3e-3."""


def keep_exact_kernels(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Take out of `attention.BATCH_KERNELS` what does not run or is off here, gradients included.

    Versions of cuDNN and torch differ, and a gradient that is off is seen by nobody.

    Args:
        config: of the model, for the shapes of its heads.
        device: that it trains on.
        dtype: that it computes in.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kernels = attention.BATCH_KERNELS[:]
    exact = [kernel for kernel in kernels if is_exact(kernel, heads, key_heads, size, device, dtype)]
    attention.BATCH_KERNELS[:] = exact


def is_exact(
    kernel: SDPBackend, heads: int, key_heads: int, size: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether results and gradients of a kernel are the packed rows' kernel's."""
    for sequences, length in ROWS:
        generator = torch.Generator(device).manual_seed(0)
        q, k, v, grad = (
            torch.randn(sequences * length, n, size, dtype=dtype, device=device, generator=generator)
            for n in (heads, key_heads, key_heads, heads)
        )
        borders = torch.arange(sequences + 1, device=device, dtype=torch.int32) * length
        leaves = [x.requires_grad_() for x in (q, k, v)]
        try:
            out = attention.batch_attention(q, k, v, sequences, size**-0.5, [kernel])
            got = [out, *torch.autograd.grad(out, leaves, grad)]
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            log.warning("%s attention does not run here and is left out: %s", kernel.name, first)
            return False
        out, _ = torch.ops.keptset.varlen_attention(q, k, v, borders, length, size**-0.5, -1)
        want = [out, *torch.autograd.grad(out, leaves, grad)]
        errors = [_error(a.detach(), b.detach()) for a, b in zip(got, want, strict=True)]
        if not max(errors) < BOUND:  # NaN is not
            log.warning("%s attention is off by %s and is left out", kernel.name, errors)
            return False
    return True


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())
