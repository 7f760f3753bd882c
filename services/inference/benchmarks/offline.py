"""Decode throughput of engines side by side, without HTTP: rounds of a batch each, forwards and backwards.

    python benchmarks/offline.py --model DIR [--arms "off V1,capture v1,off V2,capture native,stock masks"]
        [--sets "about 8,512"] [--budget-seconds 500] [--output benchmarks/results/offline-h200.json]
    python benchmarks/offline.py --model TINY --arms "off V1,capture v1" --requests 8 --tokens 16 --cpu

Each arm is a process of its own with its engine; all live at the same time and share the GPU, one works at a
time.
A batch is 256 requests of 256 tokens, all at once. What counts is tokens a second, paired within a round: of
the whole batch (`compared`), and of the steps with all requests in them (`compared_steps`), which prompts do
not touch.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from arms import ARMS, EVERYWHERE, SETS, Arm, common_arguments, compare, options, order, shares, write

START_SECONDS = 400


def main() -> None:
    """Start the engines, alternate, print and write."""
    parser = options(__doc__, EVERYWHERE)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        asyncio.run(child(args, ARMS[args.child]))
        return
    start = time.monotonic()
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(name)) for name in args.arms.split(",")}
        for name in list(engines):  # all start at the same time
            try:
                engines[name].wait()
                print(f"{name}: ready after {time.monotonic() - start:.0f} s", flush=True)
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
                del engines[name]
        results: dict[str, Any] = {}
        for sets, until in shares(args, start):
            results[sets] = rounds(engines, sets, args, until)
            shown = {name: results[sets][name] for name in ("compared", "compared_steps")}
            print(json.dumps({sets: shown}, indent=1), flush=True)
            write(args, results)
        for engine in engines.values():  # all at the same time; leaving waits for each
            engine.end()
    if missing := set(args.arms.split(",")) - set(engines):
        sys.exit(f"did not start: {sorted(missing)}")


def rounds(engines: dict[str, "Engine"], sets: str, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """One warm-up, then rounds until the budget is used up."""
    for engine in engines.values():
        engine.batch(sets)
    batches: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for round_ in range(args.rounds):
        if time.monotonic() > until:
            break
        for name in order(list(engines), round_):
            batches[name].append(engines[name].batch(sets))
            print(f"{sets}, round {round_}, {name}: {batches[name][-1]}", flush=True)
    of = lambda what: {name: [batch[what] for batch in found] for name, found in batches.items()}  # noqa: E731
    compared, steps = compare(of("tokens_per_second")), compare(of("steps_tokens_per_second"))
    return {"batches": batches, "compared": compared, "compared_steps": steps}


class Engine:
    """A child process with an engine; commands go in and answers come out as lines of JSON."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cache = tempfile.TemporaryDirectory(prefix="keptset-benchmark-")

    def __enter__(self) -> "Engine":
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--child", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ARMS[self.name].environment(Path(self.cache.name)),
            text=True,
        )
        return self

    def end(self) -> None:
        """Ask it to end."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def __exit__(self, *_: object) -> None:
        self.end()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def wait(self) -> None:
        """Until it is ready; RuntimeError if its process ended."""
        self._answer()

    def batch(self, sets: str) -> dict[str, float]:
        """Let it run one batch."""
        assert self.process.stdin is not None
        print(json.dumps({"sets": sets}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"its process ended with {self.process.wait()}; its log is above")


async def child(args: argparse.Namespace, arm: Arm) -> None:
    """Run batches as they are asked for; ends with its input."""
    async with engine_of(args, arm) as engine:
        steps = watch_steps(engine)
        answer({})
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            steps.clear()
            measured = await batch(engine, args, arm, json.loads(line)["sets"])
            answer(measured | {"steps_tokens_per_second": steady_rate(steps, args.requests)})


def watch_steps(engine: Any) -> list[tuple[float, int]]:
    """When the message of each step arrives, and how many requests are in it; grows by itself."""
    core, seen = engine.engine_core, []
    get = core.get_output_async

    async def watched() -> Any:
        outputs = await get()
        seen.append((time.monotonic(), len(outputs.outputs)))
        return outputs

    core.get_output_async = watched
    return seen


def steady_rate(steps: list[tuple[float, int]], requests: int) -> float:
    """Tokens a second from the first step with all requests to the last one.

    Not from the time between two of them: an API process that is behind takes several messages at once.
    """
    times = [at for at, count in steps if count == requests]
    return round(requests * (len(times) - 1) / (times[-1] - times[0]), 1) if len(times) > 1 else 0.0


def answer(what: dict[str, float]) -> None:
    """To the parent, among what vLLM prints."""
    print("ANSWER " + json.dumps(what), flush=True)


def engine_of(args: argparse.Namespace, arm: Arm) -> Any:
    """The arm's engine, as an asynchronous context."""
    engine = {"disable_log_stats": True} | common_arguments(args, arm)
    if not arm.ours:
        return stock_engine(args.model, engine)
    from keptset_inference.environment import prepare_environment
    from keptset_settings import InferenceSettings

    settings = InferenceSettings(
        model=args.model,
        enable_return_sampling_mask=arm.capture is not None,
        capture=arm.capture or "auto",
        mask_padded_ids=False,  # the tokenizer of a random model says nothing
        vllm=engine,
    )
    choice = prepare_environment(settings)
    from keptset_inference.arguments import engine_arguments
    from keptset_inference.engine import running_engine

    kind = None if choice is None else choice.kind
    return running_engine(engine_arguments(settings), capture=kind, mask_padded_ids=False)


def stock_engine(model: str, engine: dict[str, Any]) -> Any:
    """VLLM as it comes; its own defaults for what it is not told."""
    from contextlib import asynccontextmanager

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    @asynccontextmanager
    async def running() -> Any:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, generation_config="vllm", **engine))
        try:
            yield llm
        finally:
            llm.shutdown()

    return running()


async def batch(engine: Any, args: argparse.Namespace, arm: Arm, sets: str) -> dict[str, float]:
    """All requests at once; tokens a second from the first to the last, and the mean size of the sets."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def one(number: int) -> tuple[int, int]:
        params = SamplingParams(
            **SETS[sets] | {"logprobs": 0} | arm.sampling,
            max_tokens=args.tokens,
            ignore_eos=True,
            detokenize=False,
            flat_logprobs=arm.ours,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if arm.capture is not None:
            from keptset_inference.capture.flag import mark

            mark(params)
        prompt = tokens_input([5 + (number + place) % 250 for place in range(args.prompt)])
        async for output in engine.generate(prompt, params, f"{time.monotonic_ns()}-{number}"):
            last = output.outputs[0]
        return len(last.token_ids), kept_ids(last, arm)

    wall, spent = time.monotonic(), time.process_time()
    counts = await asyncio.gather(*(one(number) for number in range(args.requests)))
    wall, spent = time.monotonic() - wall, time.process_time() - spent
    tokens = sum(count for count, _ in counts)
    return {
        "tokens_per_second": round(tokens / wall, 1),
        "mean_set": round(sum(ids for _, ids in counts) / tokens, 2),
        "frontend_cpu_us_a_token": round(1e6 * spent / tokens, 2),
    }


def kept_ids(output: Any, arm: Arm) -> int:
    """All ids of all sets of a completion."""
    if output.sampling_mask is None:
        return 0
    if arm.capture is None:
        return sum(len(row) for row in output.sampling_mask.token_ids)
    from keptset_inference.capture.packed import unpack_rows

    chunks = output.sampling_mask.token_ids
    if output.logprobs:  # speculative decoding: sets of several tokens a step, logprobs beside them
        return sum(len(chunk.token_ids) for chunk in chunks)
    return len(unpack_rows(chunks)[2].ids)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's processes have ended; taking the interpreter apart takes seconds
