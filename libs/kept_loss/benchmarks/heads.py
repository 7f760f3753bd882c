"""Times logprob heads on one GPU, forward and backward, all in one run, and writes the figures as data.

    python benchmarks/heads.py --output benchmarks/results/heads-h200.json [--prime-rl path/to/lm_head.py]
    python benchmarks/heads.py --report benchmarks/results/heads-h200.json

Medians of Triton's do_bench. Heads of others are measured where they are installed (liger-kernel,
cut-cross-entropy) or pointed at (prime-rl's chunked head, from its own source); what cannot run is named with
its error. ``--report`` prints the figures of an earlier run and needs no GPU.
"""

import argparse
import json
import statistics
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kept_loss import KeptSet, dense_kept_logprobs, kept_logprobs

DEVICE = "cuda"
VOCABULARY = 151_936
MiB = 2**20

Step = Callable[[], object]


def milliseconds(step: Step, budget: int = 300) -> float:
    """Median over as many runs as fit into ``budget`` milliseconds; the L2 cache is cleared before each."""
    from triton.testing import do_bench  # not at the top: a report needs no Triton

    return do_bench(step, warmup=100, rep=budget, return_mode="median")


def kernels_alone(step: Step, runs: int = 20) -> float:
    """Milliseconds that the GPU is busy in a run, the mean of ``runs``: no waiting for the host, and, unlike
    in ``milliseconds``, nothing cleared between them.
    """
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / runs / 1000


def published_widths(positions: int, generator: torch.Generator) -> Tensor:
    """Set sizes like the published ones: nearly half are singletons, mean about 8, p99 about 90."""
    single = torch.rand(positions, generator=generator) < 0.46
    wide = (torch.randn(positions, generator=generator) * 1.25 + 1.95).exp().ceil()
    return torch.where(single, torch.ones(positions), wide).clamp(1, 512).long()


def draw_sets(widths: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """ids, offsets, labels. Frequent ids are low, as in a byte-pair vocabulary; distinct inside a set."""
    positions = torch.repeat_interleave(torch.arange(len(widths)), widths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)])
    entry = torch.arange(int(offsets[-1])) - offsets[positions]
    stride = vocabulary // int(widths.max())
    # one id from each of `width` strides: distinct without a loop; the cube makes low ids of one frequent
    start = torch.randint(int(widths.max()), (len(widths),), generator=generator)[positions]
    stretch = (start + entry) % int(widths.max())
    ids = stretch * stride + (torch.rand(len(entry), generator=generator) ** 3 * stride).long()
    labels = ids[offsets[:-1] + (torch.rand(len(widths), generator=generator) * widths).long()]
    return ids.int(), offsets, labels


class Problem:
    """Inputs of one shape on the GPU."""

    def __init__(
        self,
        positions: int,
        width: int,
        vocabulary: int,
        widths: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """``width`` is the hidden size, ``widths`` the sizes of the sets; published ones if not given."""
        generator = torch.Generator().manual_seed(0)
        self.widths = published_widths(positions, generator) if widths is None else widths
        ids, offsets, labels = draw_sets(self.widths, vocabulary, generator)
        torch.manual_seed(0)
        hidden = torch.randn(positions, width, device=DEVICE)
        weight = torch.randn(vocabulary, width, device=DEVICE) * (2 / width**0.5)
        self.hidden = hidden.to(dtype).requires_grad_()
        self.weight = weight.to(dtype).requires_grad_()
        self.kept = KeptSet(ids.to(DEVICE), offsets.to(DEVICE))
        self.whole = KeptSet.whole_vocabulary(positions, DEVICE)
        self.labels = labels.to(DEVICE)
        self.temperature = torch.ones(positions, device=DEVICE)
        self.grad = torch.randn(positions, device=DEVICE)

    def clear(self) -> None:
        """Drop the gradients."""
        self.hidden.grad = self.weight.grad = None

    def ours(self, kept: KeptSet, entropy: Literal["full"] | float | None) -> Step:
        """kept_logprobs, forward and backward."""

        def step() -> None:
            self.clear()
            out = kept_logprobs(
                self.hidden, self.weight, self.labels, kept, self.temperature, entropy=entropy
            )
            out.logprobs.backward(self.grad)

        return step

    def floor(self, bytes_a_second: float) -> float:
        """Milliseconds to move what must move.

        The kept rows of W twice and those of hidden once; hidden; both gradients, zeroed and written.
        """
        row = self.hidden.shape[1] * self.hidden.element_size()
        gathered = int(self.widths[self.widths > 1].sum()) * row
        moved = 3 * gathered + 3 * self.hidden.numel() * 2 + 2 * self.weight.numel() * 2
        return moved / bytes_a_second * 1e3


def liger(p: Problem) -> Step:
    """liger-kernel's fused linear cross entropy."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def step() -> None:
        p.clear()
        loss(p.weight, p.hidden, p.labels).backward()

    return step


def cut_cross_entropy(p: Problem) -> Step:
    """cut-cross-entropy as it comes."""
    from cut_cross_entropy import linear_cross_entropy

    def step() -> None:
        p.clear()
        linear_cross_entropy(p.hidden, p.weight, p.labels, reduction="none").backward(p.grad)

    return step


def prime_rl(path: Path, chunk: int) -> Callable[[Problem], Step]:
    """prime-rl's chunked head from its own file; what that imports of the rest is not used by the head."""
    for name, attribute in (("logger", "get_logger"), ("vlm", "get_final_logit_softcapping")):
        module = types.ModuleType(f"prime_rl.utils.{name}")
        setattr(module, attribute, None)
        sys.modules.setdefault(module.__name__, module)
    sys.modules.setdefault("prime_rl", types.ModuleType("prime_rl"))
    sys.modules.setdefault("prime_rl.utils", types.ModuleType("prime_rl.utils"))
    module = types.ModuleType("prime_rl_lm_head")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    head = module._SequenceChunkedLogProbEntropyFn

    def make(p: Problem) -> Step:
        def step() -> None:
            p.clear()
            logprobs, _ = head.apply(p.hidden, p.weight, p.labels, 1 / p.temperature, chunk)
            logprobs.backward(p.grad)

        return step

    return make


def extra_memory(p: Problem, step: Step) -> float:
    """MiB at the peak beside inputs and gradients."""
    step()
    p.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    gradients = p.hidden.numel() * p.hidden.element_size() + p.weight.numel() * p.weight.element_size()
    return (torch.cuda.max_memory_allocated() - before - gradients) / MiB


def measured(name: str, p: Problem, make: Callable[[Problem], Step]) -> dict[str, Any]:
    """Time and memory of one head, or its error."""
    try:
        step = make(p)
        step()
        row = {"head": name, "ms": milliseconds(step), "extra_mib": extra_memory(p, step)}
    except Exception as error:  # of other people's kernels: written down, not hidden
        row = {"head": name, "error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    p.clear()
    torch.cuda.empty_cache()
    return row


def measured_kept(p: Problem) -> dict[str, Any]:
    """The kept head alone."""
    return measured("kept", p, lambda p: p.ours(p.kept, None))


def heads(p: Problem, prime: Path | None) -> list[dict[str, Any]]:
    """All heads at one shape."""
    rows = [
        measured_kept(p),
        measured("kept + entropy 0.125", p, lambda p: p.ours(p.kept, 0.125)),
        measured("kept + entropy", p, lambda p: p.ours(p.kept, "full")),
        measured("full vocabulary + entropy, ours", p, lambda p: p.ours(p.whole, "full")),
        measured("liger", p, liger),
        measured("cut-cross-entropy", p, cut_cross_entropy),
    ]
    if prime is not None:
        for chunk in (2048, 8192, 16384):
            rows.append(measured(f"prime-rl, chunk {chunk}", p, prime_rl(prime, chunk)))
    hidden, weight = p.hidden.detach(), p.weight.detach()
    return [*rows, {"head": "one LM-head matmul", "ms": milliseconds(lambda: hidden @ weight.T)}]


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def accuracy() -> list[dict[str, Any]]:
    """Errors against the dense reference in float64, with published sets and without any mask."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        p = Problem(2048, 1024, 32_768, dtype=dtype)
        p.ours(p.kept, None)()
        out = kept_logprobs(p.hidden, p.weight, p.labels, p.kept, p.temperature, full_logprobs=True)
        h, w = p.hidden.detach().double().requires_grad_(), p.weight.detach().double().requires_grad_()
        true = dense_kept_logprobs(h, w, p.labels, p.kept, p.temperature.double(), full_logprobs=True)
        true.logprobs.backward(p.grad.double())
        rows.append({
            "dtype": str(dtype),
            "logprobs": relative(out.logprobs, true.logprobs),
            "entropy": relative(out.entropy, true.entropy),
            "full_logprobs": relative(out.full_logprobs, true.full_logprobs),
            "grad_hidden": relative(p.hidden.grad, h.grad),
            "grad_weight": relative(p.weight.grad, w.grad),
        })  # fmt: skip
        q = Problem(512, 1024, 32_768, dtype=dtype)
        q.ours(q.whole, None)()
        h, w = q.hidden.detach().double().requires_grad_(), q.weight.detach().double().requires_grad_()
        true = dense_kept_logprobs(h, w, q.labels, q.whole, q.temperature.double(), entropy=None)
        true.logprobs.backward(q.grad.double())
        rows.append({
            "dtype": str(dtype),
            "head": "full vocabulary",
            "grad_hidden": relative(q.hidden.grad, h.grad),
            "grad_weight": relative(q.weight.grad, w.grad),
        })  # fmt: skip
    return rows


def repeated(p: Problem) -> bool:
    """Bitwise the same outputs and gradients twice."""
    results = []
    for _ in range(2):
        p.clear()
        out = kept_logprobs(p.hidden, p.weight, p.labels, p.kept, p.temperature, entropy="full")
        out.logprobs.backward(p.grad)
        results.append((out.logprobs.detach(), out.entropy, p.hidden.grad, p.weight.grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def bandwidth() -> float:
    """Bytes a second that a copy of 2 GiB reads and writes."""
    source = torch.empty(2**31, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def versions() -> dict[str, str]:
    """Of everything that is compared."""
    found = {"torch": torch.__version__}
    for name in ("triton", "liger-kernel", "cut-cross-entropy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def vocabulary_sweep(rounds: int = 5) -> list[dict[str, Any]]:
    """The same sets in four vocabularies, by turns; ``ms_apart`` leaves out the write of W's dense gradient,
    ``kernels_ms`` the host: how long the GPU is busy.
    """
    p = Problem(16_384, 1024, 32_768, published_widths(16_384, torch.Generator().manual_seed(1)))
    sizes = (32_768, 65_536, 131_072, 262_144)
    found: dict[int, list[tuple[float, float, float]]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            p.weight = (torch.randn(size, 1024, device=DEVICE) / 16).bfloat16().requires_grad_()
            step, weight = p.ours(p.kept, None), p.weight
            zeros = milliseconds(lambda weight=weight: torch.zeros_like(weight), budget=50)
            found[size].append((milliseconds(step, budget=100), zeros, kernels_alone(step)))
    rows = []
    for size, times in found.items():
        whole, zeros, kernels = (statistics.median(each) for each in zip(*times, strict=True))
        rows.append({
            "vocabulary": size,
            "ms": whole,
            "ms_zeros": zeros,
            "ms_apart": whole - zeros,
            "kernels_ms": kernels,
            "kernels_ms_apart": kernels - zeros,
        })  # fmt: skip
    return rows


def measure(prime: Path | None, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything; ``prime`` is prime-rl's head file, if it takes part. Saved after each part."""
    copied = bandwidth()
    data: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "copy_bytes_a_second": copied,
        "shapes": [],
    }
    for positions, width in ((16_384, 1024), (32_768, 1024), (16_384, 4096)):
        p = Problem(positions, width, VOCABULARY)
        sizes = p.widths.float()
        data["shapes"].append({
            "positions": positions,
            "hidden": width,
            "vocabulary": VOCABULARY,
            "mean": float(sizes.mean()),
            "p99": float(sizes.quantile(0.99)),
            "singletons": float((sizes == 1).float().mean()),
            "floor_ms": p.floor(copied),
            "heads": heads(p, prime),
        })  # fmt: skip
        save(data)
        if (positions, width) == (16_384, 1024):
            data["bitwise_repeatable"] = repeated(p)
            data["accuracy"] = accuracy()
            data["vocabulary_sweep"] = vocabulary_sweep()
            save(data)
    data["width_sweep"] = [
        {"width": each} | measured_kept(Problem(16_384, 1024, VOCABULARY, torch.full((16_384,), each)))
        for each in (1, 2, 8, 32, 128, 512)
    ]
    save(data)
    data["positions_sweep"] = [
        {"positions": positions} | measured_kept(Problem(positions, 1024, VOCABULARY))
        for positions in (1024, 4096, 16_384, 65_536, 131_072)
    ]
    save(data)
    return data


def main() -> None:
    """Measure and write, or print what was written."""
    from heads_table import report  # not at the top: benchmarks of the trainer load this file by its path

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="measure, and write the figures here")
    what.add_argument("--report", type=Path, help="print figures that were written before")
    parser.add_argument("--prime-rl", type=Path, help="lm_head.py of a prime-rl checkout")
    args = parser.parse_args()
    if args.report is not None:
        data = json.loads(args.report.read_text())
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        data = measure(args.prime_rl, lambda data: args.output.write_text(json.dumps(data, indent=1) + "\n"))
    report(data)


if __name__ == "__main__":
    main()
