"""Recorded sets against the engine's own full logprobs: their finite entries are the set, token by token.

    python benchmarks/exactness.py --model SMOLLM2_DIRECTORY [--capture v1,native] [--tokens 50000]
        [--budget-seconds 400] [--output benchmarks/results/exactness-h200.json]
    python benchmarks/exactness.py --model TINY --capture v1 --tokens 300 --cpu
    python benchmarks/exactness.py --model TINY --capture v1 --tokens 3000 --cpu --length 64 --preempted
        --engine '{"block_size": 32, "num_gpu_blocks_override": 24}'

The engine answers the logprobs of the whole vocabulary (`max_logprobs=-1`), which come from the tensor that
the token was sampled from. Requests of several kinds run at the same time, greedy and untruncated ones too.
Half of those that want sets have a seed, and are sent again as in production, with logprobs = 0 (`again`).
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from again import NAMES, ROUNDING, Position, Rounding, compare, enough
from arms import ARMS, shared_memory

KINDS: list[dict[str, Any]] = [
    {"top_p": 0.95, "top_k": 512},
    {"top_k": 8},
    {"top_k": 512},
    {"top_p": 0.8, "top_k": 50, "temperature": 0.7},
    {"min_p": 0.02, "top_k": 512, "temperature": 1.3},
    {"top_p": 0.97, "top_k": 512, "seed": 7},
    {"top_k": 50, "min_tokens": 8, "stop_token_ids": list(range(5, 105))},
    {"top_p": 0.95, "top_k": 50, "bad_words": ["a", "e", "the"]},
    {"top_p": 0.95, "top_k": 512, "allowed_token_ids": list(range(5, 250))},
    {"top_k": 50, "structured_outputs": {"regex": "[ -~]{1000}"}},
]
"""Sampling parameters of requests that want sets."""
WIDE: list[dict[str, Any]] = [{"top_p": 0.999, "temperature": 1.5}, {"top_k": 3000}, {"min_p": 1e-4}]
"""And of some whose sets may be wider than our own capture and than vLLM's compact form, for native."""
OTHERS: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 50}]
"""Of requests beside them that want none."""


def main() -> None:
    """One process for each capture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--capture", default="v1,native")
    parser.add_argument("--tokens", type=int, default=50_000, help="sampled tokens to compare")
    parser.add_argument("--length", type=int, default=128, help="of a completion")
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument(
        "--budget-seconds", type=float, default=400, help="for each capture; none starts later"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--cpu", action="store_true", help="does the script run?")
    parser.add_argument(
        "--preempted", action="store_true", help="some requests must have been: a small KV cache"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        asyncio.run(child(args, args.child))
        sys.stdout.flush()
        os._exit(0)  # the engine has ended; taking the interpreter apart only complains
    with ExitStack() as stack:
        children = {name: stack.enter_context(start(name)) for name in args.capture.split(",")}
        results = {name: result(name, process) for name, process in children.items()}
    if args.output is not None:
        head = {"model": Path(args.model).name, "tokens_asked_for": args.tokens}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")
    good = (
        isinstance(found, dict) and exact(found, args.tokens, preempted=args.preempted)
        for found in results.values()
    )
    sys.exit(not all(good))


def exact(counts: dict[str, Any], asked: int, *, preempted: bool = False) -> bool:
    """Whether as many tokens as were asked for were compared, and all of it was right."""
    again = counts["again"]
    if not counts["tokens"] >= asked > 0 or (again is not None and not enough(again, asked)):
        return False
    if preempted and not counts["preemptions"]:
        return False
    wrong = [counts[key] for key in ("wrong", "sampled_outside", "unasked")]
    return not any(wrong) and (again is None or not again["wrong"])


def kinds_of(capture: str, drafts: bool) -> list[dict[str, Any]]:
    """What requests with sets ask for; beside drafts vLLM refuses min_p."""
    kinds = KINDS + (WIDE if capture == "native" else [])
    return [kind for kind in kinds if not (drafts and "min_p" in kind)]


@contextmanager
def start(capture: str) -> Iterator[subprocess.Popen[str]]:
    """The process of a capture; all run at the same time."""
    with tempfile.TemporaryDirectory(prefix="keptset-benchmark-") as cache:
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--child", capture],
            env=ARMS[f"capture {capture}"].environment(Path(cache)),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def result(capture: str, process: subprocess.Popen[str]) -> dict[str, Any] | str:
    """What it came to; whatever else it says is passed on."""
    found: dict[str, Any] | str = ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ANSWER "):
            found = json.loads(line.removeprefix("ANSWER "))
        print(line, end="", flush=True)
    code = process.wait()
    return found if found and code == 0 else f"failed: exit code {code}, {found or 'nothing compared'}"


async def child(args: argparse.Namespace, capture: str) -> None:
    """Sample and compare until there are enough tokens."""
    from keptset_inference.environment import prepare_environment
    from keptset_settings import InferenceSettings

    engine: dict[str, Any] = {
        "max_logprobs": -1,
        "max_model_len": 512,
        "max_num_seqs": args.at_once,
        "seed": 0,
    }
    engine |= {"dtype": "float32"} if args.cpu else shared_memory(4) | {"dtype": "bfloat16"}
    settings = InferenceSettings(
        model=args.model,
        enable_return_sampling_mask=True,
        capture=capture,
        mask_padded_ids=False,
        vllm=engine | args.engine,
    )
    prepare_environment(settings)
    from keptset_inference.arguments import engine_arguments
    from keptset_inference.engine import running_engine

    names = ("tokens", "equal", "wrong", "sampled_outside", "unasked", "wider_than_512", "widest", "ids")
    counts: dict[str, Any] = dict.fromkeys(names, 0)
    drafts = "speculative_config" in args.engine  # with which nothing is packed
    counts["again"] = None if drafts else dict.fromkeys(NAMES, 0)
    rounding = ROUNDING[(engine | args.engine)["dtype"]]
    kinds = kinds_of(capture, drafts)
    async with running_engine(engine_arguments(settings), capture=capture, mask_padded_ids=False) as running:
        start = time.monotonic()
        vocabulary = running.vllm_config.model_config.get_vocab_size()
        number = 0
        while counts["tokens"] < args.tokens and time.monotonic() - start < args.budget_seconds:
            requests = range(number, number + args.at_once)
            number += args.at_once
            await asyncio.gather(
                *(one(running, args, vocabulary, kinds, i, counts, rounding) for i in requests)
            )
            counts["preemptions"] = preemptions()
            print(capture, counts, flush=True)
    counts["mean_set"] = round(counts["ids"] / max(counts["tokens"], 1), 2)
    print("ANSWER " + json.dumps(counts), flush=True)


def preemptions() -> int:
    """How often the engine has put a request back for want of room."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found = [metric for metric in get_metrics_snapshot() if metric.name == "vllm:num_preemptions"]
    assert found, "vLLM counts preemptions by another name"
    return sum(metric.value for metric in found)


async def one(
    engine: Any,
    args: argparse.Namespace,
    vocabulary: int,
    kinds: list[dict[str, Any]],
    number: int,
    counts: dict[str, Any],
    rounding: Rounding,
) -> None:
    """A request of one kind; of those that want sets every token is compared, of those with a seed twice."""
    wants = number % 6 != 5
    place, choices = (number - number // 6, kinds) if wants else (number // 6, OTHERS)
    turn, which = divmod(place, len(choices))
    kind = choices[which]
    prompt = np.random.default_rng(number).integers(5, 250, 16).tolist()
    if not wants:
        # Longer, so that requests whose sets are packed run beside some that want none, and later alone.
        params = parameters(kind, logprobs=0, max_tokens=args.length * 3 // 2, wants=False)
        async for piece in pieces(engine, prompt, params, f"exactness-{number}"):
            counts["unasked"] += piece.sampling_mask is not None
        return
    repeats = counts["again"] is not None and (turn % 2 == 0 or "seed" in kind)
    if repeats:
        kind = {"seed": number} | kind
    first: list[Position] = []
    params = parameters(kind, logprobs=vocabulary, max_tokens=args.length, wants=True)
    async for piece in pieces(engine, prompt, params, f"exactness-{number}"):
        found = whole(piece, counts)
        if repeats:
            first += found
    if repeats:
        params = parameters(kind, logprobs=0, max_tokens=args.length, wants=True)
        again: list[Position] = []
        async for piece in pieces(engine, prompt, params, f"exactness-{number}-again"):
            again += packed(piece)
        for name, count in compare(first, again, rounding).items():
            counts["again"][name] += count


def parameters(kind: dict[str, Any], *, logprobs: int, max_tokens: int, wants: bool) -> Any:
    """Of one request."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    from keptset_inference.capture.flag import mark

    structured = {
        name: StructuredOutputsParams(**value) for name, value in kind.items() if name == "structured_outputs"
    }
    params = SamplingParams(
        **kind | structured,
        logprobs=logprobs,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,  # a token at a time: a row may be as long as the vocabulary
    )
    if wants:
        mark(params)
    return params


async def pieces(engine: Any, prompt: list[int], params: Any, name: str) -> AsyncIterator[Any]:
    """What is answered, piece by piece."""
    from vllm.inputs.engine import tokens_input

    async for output in engine.generate(tokens_input(prompt), params, name):
        if output.outputs[0].token_ids:
            yield output.outputs[0]


def whole(piece: Any, counts: dict[str, Any]) -> list[Position]:
    """Hold sets against the logprobs of the whole vocabulary."""
    from keptset_inference.capture.csr import kept_tokens

    kept = kept_tokens(piece.sampling_mask.token_ids if piece.sampling_mask is not None else ())
    rows = np.split(kept.ids, np.cumsum(kept.counts)[:-1])
    logprobs = piece.logprobs.arrays()
    positions = []
    for position, (token, row) in enumerate(zip(piece.token_ids, rows, strict=True)):
        # Column 0 is the sampled token, which is among the others once more.
        values, ids = logprobs.logprobs[position, 1:], logprobs.token_ids[position, 1:]
        finite = np.flatnonzero(values > -np.inf)
        there = finite[np.argsort(ids[finite])]
        equal = np.array_equal(ids[there], row)
        counts["tokens"] += 1
        counts["equal"] += equal
        counts["wrong"] += not equal
        counts["sampled_outside"] += token not in row
        counts["wider_than_512"] += len(row) > 512
        counts["widest"] = max(counts["widest"], len(row))
        counts["ids"] += len(row)
        positions.append(Position(token, ids[there], values[there]))
    return positions


def packed(piece: Any) -> list[Position]:
    """Sets and logprobs that came in one array a token."""
    from keptset_inference.capture.packed import unpack_rows

    _, logprobs, kept = unpack_rows(piece.sampling_mask.token_ids)
    rows = np.split(kept.ids, np.cumsum(kept.counts)[:-1])
    return [
        Position(token, row, logprobs[place : place + 1])
        for place, (token, row) in enumerate(zip(piece.token_ids, rows, strict=True))
    ]


if __name__ == "__main__":
    main()
