"""Attention over packed rows with torch's own kernels, for any transformers model that asks for it by name.

A row of sequences goes to FlashAttention's variable-length kernel, which sees the borders and no mask. Where
all sequences of a row are equally long, the row is a batch, and cuDNN's kernel (on a GPU) is faster.
On a CPU each sequence is computed by itself: slow, the same numbers.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from . import cudnn_ragged

VARLEN = "keptset_varlen"
"""What `attn_implementation` is to be set to; rows then come with the keywords of `borders_of`."""

BATCH_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""For rows of equally long sequences on a GPU, first choice first; without any they are as others are. What
is not exact there is taken out before a training (`attention_proof`)."""

RAGGED_KERNEL = ["flash"]
"""For other rows on a GPU: "flash", or "cudnn", which is faster and makes a plan for every shape."""


@contextmanager
def ragged_kernel(name: str) -> Iterator[None]:
    """Another RAGGED_KERNEL for a while, on all threads."""
    usual = RAGGED_KERNEL[:]
    RAGGED_KERNEL[:] = [name]
    try:
        yield
    finally:
        RAGGED_KERNEL[:] = usual


def borders_of(borders: Tensor, longest: int) -> dict[str, Any]:
    """The keywords under which transformers hands the borders of a packed row down to the attention.

    Args:
        borders: integers [S + 1].
        longest: tokens of the longest sequence.
    """
    lengths = borders.to(torch.int32)
    return {
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, L, D], keys and values [1, fewer, L, D] -> [1, L, heads, D].

    Raises:
        ValueError: the architecture wants something that the kernels do not do.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {name} in its attention, which the variable-length kernel "
                'does not know; set trainer.attention = "sdpa" or choose another architecture'
            )
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            f"{type(module).__name__} was not told where sequences end (cu_seq_lens_q): its model does not "
            'hand keywords down to its attention; set trainer.attention = "sdpa"'
        )
    causal = options.get("is_causal")
    assert dropout == 0.0
    assert causal is not False
    assert getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [L, heads, D], mostly a view
    tokens, sequences = q.shape[0], cu_seq_lens_q.shape[0] - 1
    is_batch = tokens == sequences * max_length_q
    if (
        BATCH_KERNELS
        and not torch.are_deterministic_algorithms_enabled()  # FlashAttention keeps to that, cuDNN does not
        and q.is_cuda
        and is_batch
        and (sliding_window is None or sliding_window >= max_length_q)
    ):
        out = batch_attention(q, k, v, sequences, scale)
    else:
        window = -1 if sliding_window is None else sliding_window - 1
        out = torch.ops.keptset.varlen_attention(q, k, v, cu_seq_lens_q, max_length_q, scale, window)[0]
    return out[None], None


def batch_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: int, scale: float, kernels: list[SDPBackend] | None = None
) -> Tensor:
    """Causal attention over equally long sequences: [S * length, heads, D]; unset: BATCH_KERNELS."""
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))  # [S, heads, length, D]
    with sdpa_kernel(kernels or BATCH_KERNELS, set_priority=True):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).flatten(0, 1)


@torch.library.custom_op("keptset::varlen_attention", mutates_args=())
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each sequence: ([L, heads, D], logsumexp [heads, L] float32).

    Args:
        q: [L, heads, D].
        k: [L, key heads, D], of which each serves heads / key heads of `q`.
        v: as `k`.
        borders: int32 [S + 1].
        longest: tokens of the longest sequence, or more.
        scale: of the products.
        window: how many tokens back are seen; -1 for all.
    """
    out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for start, stop in spans(borders):
        scores = scores_of(q[start:stop], k[start:stop], scale, window)  # [heads, length, length]
        logsumexp[:, start:stop] = scores.logsumexp(-1)
        values = v[start:stop].repeat_interleave(q.shape[1] // v.shape[1], 1).to(scores.dtype)
        out[start:stop] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values).to(q.dtype)
    return out, logsumexp


@varlen_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: int) -> Any:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@varlen_attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: int) -> Any:
    if takes_cudnn(q, k, window):
        out, stats = cudnn_ragged.forward(q, k, v, borders, longest, scale)
        return out, stats.view(q.shape[1], q.shape[0])  # [L, heads] under another name
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, borders, borders, longest, longest, 0.0, window < 0, False,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip
    return out, logsumexp


@torch.library.custom_op("keptset::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    borders: Tensor, longest: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    served = q.shape[1] // k.shape[1]

    def of_keys(values: Tensor) -> Tensor:  # [length, heads, D] -> [length, key heads, D]
        return values.unflatten(1, (-1, served)).sum(2)

    for start, stop in spans(borders):
        part = slice(start, stop)
        weights = (scores_of(q[part], k[part], scale, window) - logsumexp[:, part, None]).exp()
        g, keys, values = (
            grad[part].float(),
            *(x[part].float().repeat_interleave(served, 1) for x in (k, v)),
        )
        share = torch.einsum("ihd,jhd->hij", g, values) - (g * out[part].float()).sum(-1).T[:, :, None]
        slopes = weights * share * scale
        grads[0][part] = torch.einsum("hij,jhd->ihd", slopes, keys).to(q.dtype)
        grads[1][part] = of_keys(torch.einsum("hij,ihd->jhd", slopes, q[part].float())).to(k.dtype)
        grads[2][part] = of_keys(torch.einsum("hij,ihd->jhd", weights, g)).to(v.dtype)
    return grads


@varlen_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    borders: Tensor, longest: int, scale: float, window: int,
) -> Any:  # fmt: skip
    return tuple(torch.empty_like(x) for x in (q, k, v))


@varlen_attention_backward.register_kernel("cuda")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    borders: Tensor, longest: int, scale: float, window: int,
) -> Any:  # fmt: skip
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    if takes_cudnn(q, k, window):
        stats = logsumexp.view(q.shape[0], q.shape[1])
        return cudnn_ragged.backward(grad.contiguous(), q, k, v, out, stats, borders, longest, scale)
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, logsumexp, borders, borders, longest, longest, 0.0, window < 0,
        no_dropout, unused, scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip


def takes_cudnn(q: Tensor, k: Tensor, window: int) -> bool:
    """Whether a ragged row goes to cuDNN, which promises no determinism."""
    if RAGGED_KERNEL != ["cudnn"] or window >= 0 or torch.are_deterministic_algorithms_enabled():
        return False
    return cudnn_ragged.is_exact(q.device.index, q.shape[1], k.shape[1], q.shape[2], q.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, borders, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, borders)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, borders = ctx.saved_tensors
    grads = varlen_attention_backward(grad, *saved, borders, ctx.longest, ctx.scale, ctx.window)
    return (*grads, None, None, None, None)


varlen_attention.register_autograd(_backward, setup_context=_save)


def spans(borders: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of each sequence."""
    ends = borders.tolist()
    return [(start, stop) for start, stop in pairwise(ends) if stop > start]


def scores_of(q: Tensor, k: Tensor, scale: float, window: int) -> Tensor:
    """Scaled products of one sequence, float32 [heads, length, length], -inf where nothing is seen."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("ihd,jhd->hij", q.float(), keys.float()) * scale
    back = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)[None, :]
    hidden = (back < 0) | (back > window if window >= 0 else torch.zeros_like(back, dtype=torch.bool))
    return scores.masked_fill(hidden, -math.inf)


AttentionInterface.register(VARLEN, attend)
