"""Times whole training steps of a Qwen3-0.6B-shaped model, with the trainer's own step, optimiser included.

    python benchmarks/step.py --output benchmarks/results/step-h200.json        one GPU
    torchrun --nproc-per-node 2 benchmarks/step.py --output ... --append        two, and one of them alone
    python benchmarks/step.py --report benchmarks/results/step-h200.json        prints an earlier run

A step goes from samples on the host to applied weights. Sorting them into rows is timed apart (`packing_ms`);
each row is packed in the step, when it is its turn (`pack_rows.py` times that alone). Every result is written
when it is there. `--device cpu --tiny` tries all of it without a GPU (recordings are then the work itself).
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from qwen3_shape import TINY, Size, lengths_of, samples_of
from step_cases import Case, cases_of_many, cases_of_one, owned_bytes, said
from step_clock import matmul_rate, profiled
from step_heads import heads
from step_table import print_table

from keptset_settings import ClippedRatioLoss
from keptset_trainer import attention, cudnn_ragged
from keptset_trainer.graphs import done_again
from keptset_trainer.losses import loss_function
from keptset_trainer.optimizer import adamw
from keptset_trainer.packing import pack
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks, join, leave
from keptset_trainer.scorer import Head
from keptset_trainer.train_step import train_step

GiB = 2**30


class Bench:
    """One way to prepare the model; heads and shapes change on it."""

    def __init__(self, case: Case, size: Size, ranks: Ranks, prime: Path | None, profile: bool) -> None:
        """`profile`: some cases; whatever is measured after that may be slower."""
        self.case, self.size, self.ranks, self.profile = case, size, ranks, profile
        self.heads = heads(prime)
        self.policy = size.policy(ranks.device, torch.bfloat16)
        self.parameters = sum(p.numel() for p in self.policy.model.parameters())
        self.flops = partial(size.flops, self.policy.model)
        self.flops_of = {shape: self.flops(lengths_of(shape, size.tokens)) for shape in ("16x", "4x", "1x")}
        self.scorer, self.weights = prepare(
            self.policy,
            ranks,
            checkpointing=case.checkpointing,
            compiled=case.compiled,
            sharding=case.sharding,
            graphs="on" if case.graphs else "off",
            record=None if ranks.device.type == "cuda" else done_again,
            backward_groups=case.backward_groups,
            gather_in_place=case.gather_in_place,
        )
        self.optimizer = adamw(self.weights, lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)

    def stepper(self, case: Case) -> "Stepper":
        """What does one step of a case after the other."""
        head, entropy = self.heads[case.head]
        batches = []
        for seed in range(4 if case.varied else 1):
            lengths = [
                length
                for rank in range(self.ranks.size)
                for length in lengths_of(case.shape, self.size.tokens, seed + 10 * rank * case.varied)
            ]
            batches.append(samples_of(lengths, self.size.vocabulary, seed))
        return Stepper(self, case, head, entropy, batches)


@dataclass
class Stepper:
    """The steps of one case, and how long they took."""

    bench: Bench
    case: Case
    head: Head
    entropy: Any
    batches: list[Any]
    packing: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    peak: int = 0
    done: int = 0
    error: str | None = None

    @property
    def warm_up(self) -> int:
        """Steps that are not counted: what is compiled, recorded, allocated."""
        return 4 + len(self.batches) * (len(self.batches) > 1)

    def step(self) -> None:
        """One step, from rows on the host until the device has done it."""
        bench, tokens, cuda = self.bench, self.bench.size.tokens, self.bench.ranks.device.type == "cuda"
        samples = self.batches[self.done % len(self.batches)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        rows = pack(samples, tokens, bench.ranks.rank, bench.ranks.size)
        packed = time.perf_counter()
        assert len(rows) == 1
        self.train(samples, rows)
        if self.done >= self.warm_up:
            self.packing.append((packed - began) * 1e3)
            self.times.append((time.perf_counter() - packed) * 1e3)
            # what belongs to a recording is reserved, but not allocated any more
            used = torch.cuda.max_memory_reserved if self.case.graphs else torch.cuda.max_memory_allocated
            self.peak = max(self.peak, used() if cuda else 0)
        self.done += 1

    def train(self, samples: Any, rows: Any) -> None:
        """The trainer's own step."""
        bench = self.bench
        bench.scorer.head = self.head
        train_step(
            bench.scorer,
            bench.weights,
            bench.optimizer,
            bench.ranks,
            samples,
            rows,
            LOSS,
            max_grad_norm=1.0,
            entropy=self.entropy,
            ignore_masks=False,
            told_to_stop=lambda: False,
        )

    def result(self) -> dict[str, Any]:
        """Medians, and a profile where it tells the most."""
        bench, case, tokens = self.bench, self.case, self.bench.size.tokens
        if self.error is not None:
            return {"error": self.error}
        milliseconds = max(bench.ranks.gathered(statistics.median(self.times)))
        breaks = torch._dynamo.utils.counters["graph_break"]
        result = {
            "ms": milliseconds,
            "ms_fastest": min(self.times),
            "ms_all": [round(one, 2) for one in self.times],
            "packing_ms": statistics.median(self.packing),
            "tokens_a_second": bench.ranks.size * tokens / milliseconds * 1e3,
            "model_tflop": bench.flops_of[case.shape] / 1e12,
            "graph_breaks": {reason.split("\n")[0][:120]: count for reason, count in breaks.items()},
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            "recorded": 0 if bench.scorer.graphs is None else len(bench.scorer.graphs.recorded),
        }
        if bench.ranks.device.type == "cuda":
            if bench.profile and case.compiled and not case.varied:
                rows = pack(self.batches[0], tokens, bench.ranks.rank, bench.ranks.size)
                kernels, waits = profiled(partial(self.train, self.batches[0], rows))
                result |= {"kernels_ms": kernels[0][1], "kernels": kernels if case.head == "kept" else []}
                result |= {"waits": waits}
            own = bench.parameters * owned_bytes(case)
            result |= {"peak_gib": self.peak / GiB, "beside_gib": (self.peak - own) / GiB}
        return result


LOSS = loss_function(ClippedRatioLoss())


KERNELS = {"cuDNN": [*attention.BATCH_KERNELS], "flash": attention.BATCH_KERNELS[1:], "varlen": []}


def fastest(rows: list[dict[str, Any]]) -> str:
    """Of the kernels for rows of equal sequences that attention.py found exact."""
    names = {"batch cuDNN": "cuDNN", "batch flash": "flash", "varlen flash": "varlen"}
    good = [row for row in rows if row["shape"] == "16x" and "ms" in row and max(row["errors"]) < 1e-2]
    found = [(row["ms"], names[row["kernel"]]) for row in good if row["kernel"] in names]
    return min(found)[1] if found else "cuDNN"


class Run:
    """Goes through cases, prepares anew only where it must, and writes every row at once."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        self.size = TINY if options.tiny else Size()
        self.began = time.monotonic()
        self.kernel = options.batch_kernel
        if options.kernels is not None and options.kernels.exists():
            self.kernel = fastest(json.loads(options.kernels.read_bytes())["rows"])
        self.bench: Bench | None = None
        self.results: dict[str, Any] = {"rows": []}
        if options.append and options.output.exists():
            self.results = json.loads(options.output.read_bytes())
        rate = matmul_rate(ranks.device)
        cuda = ranks.device.type == "cuda"
        self.results["batch_kernel"] = self.kernel
        self.results.setdefault("machine", torch.cuda.get_device_name() if cuda else "cpu")
        self.results.setdefault("torch", torch.__version__)
        self.results.setdefault("matmul_tflops", rate)
        self.results.setdefault("model", asdict(self.size))
        self.rate = rate
        library = cudnn_ragged.library() if cuda else None
        self.frontend = None if library is None else library.__version__

    def rows(self, cases: list[Case]) -> None:
        """Measure cases, those that are prepared alike step by step in turn, so that they share what the
        machine does beside; or write down why not.
        """
        for _, group in itertools.groupby(map(self.with_kernel, cases), self.preparation):
            self.group(list(group))

    def with_kernel(self, case: Case) -> Case:
        return replace(case, batch_kernel=self.kernel) if case.batch_kernel == "cuDNN" else case

    def preparation(self, case: Case) -> tuple[Any, ...]:
        """What two cases must share; a shape is compiled for itself, as in a run whose rows are alike."""
        return (
            case.compiled, case.checkpointing, case.graphs, case.sharding, case.batch_kernel,
            case.deterministic, case.compiled and (case.shape, case.varied), case.ranks,
            case.gather_in_place, case.backward_groups,
        )  # fmt: skip

    def group(self, cases: list[Case]) -> None:
        """Measure cases that are prepared alike."""
        left = self.options.budget_seconds - (time.monotonic() - self.began)
        began = time.monotonic()
        if self.ranks.from_first(int(left < 5)):
            return self.write([(case, {"skipped": "out of time"}) for case in cases], began)
        try:
            measured = self.measured(cases)
        except Exception as error:
            if self.ranks.size > 1:
                raise  # the other rank would wait for this one
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]
            return self.write([(case, {"error": text}) for case in cases], began)
        return self.write(measured, began)

    def write(self, measured: list[tuple[Case, dict[str, Any]]], began: float) -> None:
        """Keep what was measured, at once."""
        for case, result in measured:
            row = {**asdict(case), **result, "run_of": self.ranks.size, "seconds": time.monotonic() - began}
            if "ms" in row:
                row["mfu"] = row["model_tflop"] / row["ms"] * 1e3 / self.rate
            self.results["rows"].append(row)
            if self.ranks.is_first:
                print(f"{time.monotonic() - self.began:6.1f} s  {said(row)}", flush=True)
        if self.ranks.is_first:
            self.results |= {"batch_kernel": self.kernel, "cudnn_frontend": self.frontend}
            self.options.output.write_text(json.dumps(self.results, indent=1))

    def measured(self, cases: list[Case]) -> list[tuple[Case, dict[str, Any]]]:
        case = cases[0]
        torch.use_deterministic_algorithms(case.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False
        attention.BATCH_KERNELS[:] = KERNELS[case.batch_kernel]
        self.bench = None
        gc.collect()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        if case.ranks == self.ranks.size:
            return self.steps(cases, self.ranks)
        alone = self.steps(cases, Ranks(self.ranks.device)) if self.ranks.is_first else []
        self.ranks.gathered(None)  # the other GPUs are idle meanwhile
        return alone

    def steps(self, cases: list[Case], ranks: Ranks) -> list[tuple[Case, dict[str, Any]]]:
        """Of cases that are prepared alike, on these ranks."""
        self.bench = Bench(cases[0], self.size, ranks, self.options.prime_rl, profile=self.ranks.size == 1)
        steppers = [self.bench.stepper(case) for case in cases]
        gc.disable()  # its pauses are long enough to be seen
        try:
            for _ in range(max(one.warm_up for one in steppers) + self.options.steps):
                for one in steppers:
                    if one.error is None:
                        self.attempt(one)
        finally:
            gc.enable()
        return [(one.case, one.result()) for one in steppers]

    def attempt(self, stepper: Stepper) -> None:
        """A step; a head that fails before its first counted one is left out of the group."""
        try:
            stepper.step()
        except Exception as error:
            if self.ranks.size > 1 or stepper.done >= stepper.warm_up or len(self.bench.heads) == 1:
                raise
            traceback.print_exc()
            stepper.error = f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--append", action="store_true", help="add rows to what is in --output")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=12, help="timed ones of each row")
    parser.add_argument("--budget-seconds", type=float, default=200.0)
    parser.add_argument("--batch-kernel", choices=list(KERNELS), default="cuDNN")
    parser.add_argument("--kernels", type=Path, help="what attention.py wrote: take the fastest exact one")
    parser.add_argument(
        "--shapes", nargs="+", choices=["16x", "4x", "1x"], help="these alone, kept head, one GPU"
    )
    parser.add_argument("--prime-rl", type=Path, help="its lm_head.py")
    options = parser.parse_args()
    if options.report is not None:
        return print_table(json.loads(options.report.read_bytes()))
    ranks = join(options.device)
    run = Run(options, ranks)
    if ranks.size == 1:
        chosen = [Case(shape) for shape in options.shapes or ()]
        run.rows(chosen or cases_of_one(options.prime_rl))
    else:
        run.rows(cases_of_many(ranks.size))
    if ranks.is_first:
        print_table(run.results)
    leave()
    return None


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the deterministic row
    main()
