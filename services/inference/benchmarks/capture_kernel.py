"""GPU time of the cut: our kernels against reading and writing the logits once, and what they replace.

    python benchmarks/capture_kernel.py [--rows 256] [--output benchmarks/results/capture-kernel-h200.json]
    python benchmarks/capture_kernel.py --sweep          # other block sizes
    python benchmarks/capture_kernel.py --device cpu --rows 4 --vocabulary 5000     # does the script run?

Medians of CUDA events, the logits made anew and the cache cleared before each run. `sampler off` and
`sampler on` are vLLM's whole V1 sampler for the same requests without and with capture: their difference is
what capture adds to a decode step.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from keptset_inference.capture import cut as cut_module
from keptset_inference.capture.cut import PAD, cut_on_host, cut_rows
from keptset_inference.capture.flag import mark
from keptset_inference.capture.rows import KeptRows
from keptset_inference.capture.v1 import CaptureSampler

CASES = {
    "top_k 8": dict(top_k=8, top_p=1.0, scale=3.0, dtype=torch.float32),
    "top_k 512": dict(top_k=512, top_p=1.0, scale=3.0, dtype=torch.float32),
    "top_k 512, top_p .95, sets of about 8": dict(top_k=512, top_p=0.95, scale=8.0, dtype=torch.float32),
    "top_k 512, logits of bfloat16": dict(top_k=512, top_p=1.0, scale=3.0, dtype=torch.bfloat16),
}


class Clock:
    """Microseconds of a step, the median of some runs; `prepare` is not counted."""

    def __init__(self, device: str, runs: int) -> None:
        self.device, self.runs = device, runs
        self.cache = torch.empty(2**26 if device == "cuda" else 1, device=device)  # 256 MiB

    def __call__(self, prepare: Callable[[], object], step: Callable[[], object]) -> float:
        if self.device == "cpu":
            times = []
            for _ in range(self.runs):
                prepare()
                start = time.perf_counter()
                step()
                times.append(1e6 * (time.perf_counter() - start))
            return statistics.median(times)
        for _ in range(5):
            prepare()
            step()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.runs)]
        for start, end in events:
            prepare()
            self.cache.zero_()
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(1e3 * start.elapsed_time(end) for start, end in events)


def metadata(requests: list[SamplingParams], vocabulary: int, device: str, kept: bool) -> SamplingMetadata:
    """As the V1 model runner builds it for one step of these requests."""
    processors = []
    if kept:
        config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary),
            scheduler_config=SimpleNamespace(max_num_seqs=len(requests)),
        )
        rows = KeptRows(config, torch.device(device), False)
        rows.update_state(
            BatchUpdate(len(requests), [], [(i, p, None, []) for i, p in enumerate(requests)], [])
        )
        processors = [rows]
    fields = dict.fromkeys(field.name for field in dataclasses.fields(SamplingMetadata))
    top_k = torch.tensor([p.top_k for p in requests], dtype=torch.int32, device=device)
    top_p = torch.tensor([p.top_p for p in requests], device=device)
    fields |= {
        "temperature": torch.tensor([p.temperature for p in requests], device=device),
        "all_greedy": False,
        "all_random": True,
        "top_k": top_k,
        "top_p": top_p if any(p.top_p < 1 for p in requests) else None,
        "generators": {},
        "max_num_logprobs": 0,
        "no_penalties": True,
        "output_token_ids": [],
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(processors),
    }
    return SamplingMetadata(**fields)


def request(top_k: int, top_p: float) -> SamplingParams:
    """One that wants kept sets."""
    params = SamplingParams(top_k=top_k, top_p=top_p, logprobs=0)
    mark(params)
    return params


def measure(
    clock: Clock, rows: int, vocabulary: int, top_k: int, top_p: float, scale: float, dtype: torch.dtype
) -> dict[str, float]:
    """All times of one case."""
    device = clock.device
    generator = torch.Generator(device).manual_seed(0)
    source = (torch.randn(rows, vocabulary, device=device, generator=generator) * scale).to(dtype).float()
    logits = source.clone()
    k = torch.full((rows,), top_k, dtype=torch.int32, device=device)
    p = torch.full((rows,), top_p, device=device)
    restore = lambda: logits.copy_(source)  # noqa: E731
    cut = lambda: cut_rows(logits, k, p, vocabulary, top_k)  # noqa: E731
    check(source, k, p, top_k)
    none = torch.zeros_like(k)
    requests = [request(top_k, top_p)] * rows
    off, on = Sampler("processed_logprobs"), CaptureSampler("processed_logprobs")
    steps = {kept: metadata(requests, vocabulary, device, kept) for kept in (False, True)}
    return {
        "read once": clock(restore, lambda: logits.amax()),
        "write once": clock(restore, lambda: logits.fill_(0.0)),
        "cut": clock(restore, cut),
        "cut, the largest chunks": clock(restore, partial(with_the_largest_chunks, cut)),
        "cut, nobody wants sets": clock(restore, lambda: cut_rows(logits, none, p, vocabulary, top_k)),
        "vLLM's top-k and top-p": clock(
            restore, lambda: apply_top_k_top_p(logits, k.clone(), p if top_p < 1 else None)
        ),
        "sampler off": clock(restore, lambda: off.forward(logits, steps[False])),
        "sampler on": clock(restore, lambda: on.forward(logits, steps[True])),
    }


def with_the_largest_chunks(step: Callable[[], object]) -> None:
    """As for a large vocabulary, whatever `cut.chunk_of` says: below 65,536 ids it takes smaller ones."""
    found, cut_module.chunk_of = cut_module.chunk_of, _largest
    try:
        step()
    finally:
        cut_module.chunk_of = found


def _largest(limit: int, largest: int) -> int:
    return largest


def check(source: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> None:
    """The sets are those of the reference, but for ids at the border of top_p."""
    left = source.clone()
    got = cut_rows(left, top_k, top_p, source.shape[1], width).cpu()
    part = slice(0, 16)
    want = cut_on_host(
        source[part].cpu(), top_k[part].long().cpu(), top_p[part].cpu(), source.shape[1], width
    )
    for mine, right in zip(got[part].tolist(), want.tolist(), strict=True):
        kept, expected = (set(row[1 : 1 + row[0]]) for row in (mine, right))
        assert PAD not in kept
        assert len(kept ^ expected) <= (0 if float(top_p[0]) == 1 else 1), (mine[0], right[0])
    sizes = (left > -torch.inf).sum(1).cpu()
    assert torch.equal(sizes, got[:, 0].long()), "the rows do not hold the sets that were written down"


def sweep(clock: Clock, rows: int, vocabulary: int) -> dict[str, float]:
    """The cut of two cases with other constants."""
    from keptset_inference.capture import cut_kernel as kernels

    source = torch.randn(rows, vocabulary, device=clock.device) * 3
    logits, p = source.clone(), torch.full((rows,), 0.95, device=clock.device)
    ks = {k: torch.full((rows,), k, dtype=torch.int32, device=clock.device) for k in (8, 512)}
    results = {}
    for chunk, read, work, warps in itertools.product((64, 128), (4096, 8192), (1024, 2048), (4, 8)):
        kernels.CHUNK, kernels.READ, kernels.WORK, kernels.WARPS = chunk, read, work, warps
        times = [
            round(clock(lambda: logits.copy_(source), partial(cut_rows, logits, k, p, vocabulary, top_k)), 1)
            for top_k, k in ks.items()
        ]
        name = f"CHUNK {chunk}, READ {read}, WORK {work}, WARPS {warps}"
        results |= {f"{name}, top_k {top_k}": time for top_k, time in zip(ks, times, strict=True)}
        print(name, dict(zip(ks, times, strict=True)), flush=True)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    clock = Clock(args.device, args.runs if args.device == "cuda" else 2)
    results = {}
    for name, case in CASES.items():
        case = case | {"top_k": min(case["top_k"], args.vocabulary)}
        times = measure(clock, args.rows, args.vocabulary, **case)
        times["added to a step"] = times["sampler on"] - times["sampler off"]
        results[name] = {key: round(value, 1) for key, value in times.items()}
        print(name, results[name], flush=True)
    if args.sweep:
        results["sweep"] = sweep(clock, args.rows, args.vocabulary)
    if args.output is not None:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        head = {"device": device, "torch": torch.__version__, "unit": "microseconds"}
        head |= {"rows": args.rows, "vocabulary": args.vocabulary}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
