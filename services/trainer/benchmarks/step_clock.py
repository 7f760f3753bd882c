"""What the GPU does of a step, and what it can do at most."""

from collections.abc import Callable
from typing import Any

import torch

Kernels = list[tuple[str, float, int]]


def profiled(step: Callable[[], None]) -> tuple[Kernels, dict[str, Any]]:
    """What the GPU does of one step, and where it waits.

    Returns:
        (kernel, milliseconds, calls), the longest first, and their sum before them. And milliseconds in which
        no kernel runs: before the first one, between those after it, and the largest of these by what ran
        before and after.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(1)  # the step's beginning, by the GPU's clock
        step()
    events = [
        (event.key[:100], event.self_device_time_total / 1e3, event.count)
        for event in profiler.key_averages()
        if "spin_kernel" not in event.key
    ]
    events.sort(key=lambda event: -event[1])
    all_of_them = ("all", sum(event[1] for event in events), sum(event[2] for event in events))
    return [all_of_them, *events[:40]], waits(profiler)


def waits(profiler: Any) -> dict[str, Any]:
    """When no kernel of a profile runs; its first one only marks the beginning."""
    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    gaps: list[tuple[float, str, str]] = []
    (_, end, name), *others = ran
    for start, stop, following in others:
        gaps.append((max(0.0, start - end) / 1e3, name[:60], following[:60]))
        if stop > end:
            end, name = stop, following
    first, *between = gaps
    return {
        "before_ms": first[0],
        "between_ms": sum(gap for gap, *_ in between),
        "largest": sorted(between, reverse=True)[:8],
    }


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of a large bfloat16 product of random numbers."""
    if device.type != "cuda":
        return 0.01
    from triton.testing import do_bench

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / do_bench(lambda: a @ b, warmup=100, rep=500, return_mode="median") / 1e9
