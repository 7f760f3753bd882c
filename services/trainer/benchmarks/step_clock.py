"""What the GPU does of a step, and what it can do at most."""

from collections.abc import Callable

import torch


def profiled(step: Callable[[], None]) -> list[tuple[str, float, int]]:
    """(kernel, milliseconds, calls) of one step, the longest first, and their sum."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
    events = [
        (event.key[:100], event.self_device_time_total / 1e3, event.count)
        for event in profiler.key_averages()
    ]
    events.sort(key=lambda event: -event[1])
    return [("all", sum(event[1] for event in events), sum(event[2] for event in events)), *events[:40]]


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of a large bfloat16 product of random numbers."""
    if device.type != "cuda":
        return 0.01
    from triton.testing import do_bench

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / do_bench(lambda: a @ b, warmup=100, rep=500, return_mode="median") / 1e9
