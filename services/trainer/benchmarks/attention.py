"""Times torch's attention kernels over one packed row, forward and backward, each against float32.

    python benchmarks/attention.py --output benchmarks/results/attention-h200.json

A process of its own: a kernel that fails may take its process along. What cannot run is named with its error.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from qwen3_shape import TINY, Size, lengths_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keptset_trainer.attention import RAGGED_KERNEL

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def dense(backend: SDPBackend, repeat: bool = False) -> Kernel:
    """The row as a batch, with the keys repeated for every query head or not."""

    def run(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int) -> Tensor:
        batch = len(borders) - 1
        if repeat:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k, v = (x.unflatten(0, (batch, longest)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def varlen(kernel: str) -> Kernel:
    """What the trainer uses for sequences that differ."""

    def run(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int) -> Tensor:
        RAGGED_KERNEL[:] = [kernel]
        return torch.ops.keptset.varlen_attention(q, k, v, borders, longest, q.shape[-1] ** -0.5, -1)[0]

    return run


def flex() -> Kernel:
    """flex_attention, compiled, with a mask of blocks that is made once a row: for all layers of a model."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int) -> Tensor:
        if id(borders) not in masks:
            at = torch.arange(len(q), device=q.device)
            sequence = torch.searchsorted(borders[1:].long(), at, right=True)

            def seen(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return (i >= j) & (sequence[i] == sequence[j])

            masks[id(borders)] = create_block_mask(seen, None, None, len(q), len(q), device=q.device)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = compiled(q, k, v, block_mask=masks[id(borders)], enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


def kernels(equal: bool) -> dict[str, Kernel]:
    """By name; those for batches only if all sequences are equally long."""
    batches = {
        "batch cuDNN": dense(SDPBackend.CUDNN_ATTENTION),
        "batch cuDNN, keys repeated": dense(SDPBackend.CUDNN_ATTENTION, repeat=True),
        "batch flash": dense(SDPBackend.FLASH_ATTENTION),
    }
    ragged = {
        "varlen flash": varlen("flash"),
        "varlen cuDNN": varlen("cudnn"),  # FlashAttention's figures again, where cuDNN is not taken
        "flex": flex(),
    }
    return (batches if equal else {}) | ragged


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """In float32, sequence by sequence."""
    parts = []
    for a, b, c in zip(*(x.float().split(lengths) for x in (q, k, v)), strict=True):
        a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(
                a, b.repeat_interleave(2, 1), c.repeat_interleave(2, 1), is_causal=True
            )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def measured(
    name: str, kernel: Kernel, size: Size, lengths: list[int], device: str, runs: int
) -> dict[str, Any]:
    """Milliseconds forward, and forward and backward, and the errors by norm."""
    torch.manual_seed(0)
    heads = (size.heads, size.key_heads, size.key_heads)
    inputs = [
        torch.randn(sum(lengths), h, size.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in heads
    ]
    grad = torch.randn_like(inputs[0])
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def both() -> list[Tensor]:
        out = kernel(*inputs, borders, max(lengths))
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    try:
        got = both()
        again = both()
        true = reference(*inputs, lengths)
        want = [true.detach(), *torch.autograd.grad(true, inputs, grad.float())]
        errors = [
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, want, strict=True)
        ]
        same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        row = {"errors": errors, "same_bits_twice": same}
        del true, want
        forward = timed(lambda: kernel(*(x.detach() for x in inputs), borders, max(lengths)), device, runs)
        row |= {"forward_ms": forward, "ms": timed(both, device, runs)}
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:160]}
    return {"kernel": name, **row}


def timed(run: Callable[[], object], device: str, runs: int) -> float:
    """Median milliseconds; on a GPU of the kernels alone, recorded as a CUDA graph."""
    if device == "cuda":
        from triton.testing import do_bench

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            run()
        return do_bench(graph.replay, warmup=20, rep=20 * runs, return_mode="median")
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    size = TINY if options.tiny else Size()
    rows: list[dict[str, Any]] = []
    # what takes long to compile last
    cases = [(shape, name) for shape in ("16x", "4x", "1x") for name in kernels(shape != "1x")]
    for shape, name in sorted(cases, key=lambda case: case[1] == "flex"):
        lengths = lengths_of(shape, size.tokens)
        kernel = kernels(shape != "1x")[name]
        row = {"shape": shape, **measured(name, kernel, size, lengths, options.device, options.runs)}
        rows.append(row)
        options.output.write_text(json.dumps({"tokens": size.tokens, "rows": rows}, indent=1))
        shown = (
            row.get("error")
            or f"{row['forward_ms']:.3f} {row['ms']:.3f} ms, errors "
            + " ".join(f"{e:.1e}" for e in row["errors"])
            + f", same bits {row['same_bits_twice']}"
        )
        print(f"{shape:4} {name:30} {shown}", flush=True)


if __name__ == "__main__":
    main()
