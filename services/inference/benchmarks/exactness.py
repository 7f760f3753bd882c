"""Recorded sets against the engine's own full logprobs: their finite entries are the set, token by token.

    python benchmarks/exactness.py --model SMOLLM2_DIRECTORY [--capture v1,native] [--tokens 50000]
        [--budget-seconds 400] [--output benchmarks/results/exactness-h200.json]
    python benchmarks/exactness.py --model TINY --capture v1 --tokens 300 --cpu

The engine answers the logprobs of the whole vocabulary (`max_logprobs=-1`), which come from the tensor that
the token was sampled from. Requests of several kinds run at the same time, greedy and untruncated ones too.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from arms import ARMS

KINDS: list[dict[str, Any]] = [
    {"top_p": 0.95, "top_k": 512},
    {"top_k": 8},
    {"top_k": 512},
    {"top_p": 0.8, "top_k": 50, "temperature": 0.7},
    {"min_p": 0.02, "top_k": 512, "temperature": 1.3},
    {"top_p": 0.97, "top_k": 512, "seed": 7},
]
"""Sampling parameters of requests that want sets."""
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
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        asyncio.run(child(args, args.child))
        sys.stdout.flush()
        os._exit(0)  # the engine has ended; taking the interpreter apart only complains
    results = {}
    for capture in args.capture.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--child", capture]
        environment = ARMS[f"capture {capture}"].environment()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        results[capture] = (
            json.loads(lines[-1].removeprefix("ANSWER ")) if lines else f"failed: {done.returncode}"
        )
        print(capture, results[capture], flush=True)
    if args.output is not None:
        head = {"model": Path(args.model).name}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")
    sys.exit(any(isinstance(found, str) or found["wrong"] for found in results.values()))


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
    engine |= {"dtype": "float32"} if args.cpu else {"gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
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

    counts = {"tokens": 0, "equal": 0, "wrong": 0, "sampled_outside": 0, "widest": 0, "ids": 0}
    async with running_engine(engine_arguments(settings), capture=capture, mask_padded_ids=False) as running:
        start = time.monotonic()
        vocabulary = running.vllm_config.model_config.get_vocab_size()
        number = 0
        while counts["tokens"] < args.tokens and time.monotonic() - start < args.budget_seconds:
            requests = range(number, number + args.at_once)
            number += args.at_once
            await asyncio.gather(*(one(running, args, vocabulary, request, counts) for request in requests))
            print(capture, counts, flush=True)
    counts["mean_set"] = round(counts["ids"] / max(counts["tokens"], 1), 2)
    print("ANSWER " + json.dumps(counts), flush=True)


async def one(
    engine: Any, args: argparse.Namespace, vocabulary: int, number: int, counts: dict[str, int]
) -> None:
    """A request of one kind; of those that want sets every token is compared."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from keptset_inference.capture.csr import kept_tokens
    from keptset_inference.capture.flag import mark

    wants = number % 6 != 5
    kind = (KINDS if wants else OTHERS)[number // 6 % len(KINDS if wants else OTHERS)]
    params = SamplingParams(
        **kind,
        logprobs=vocabulary if wants else 0,
        max_tokens=args.length,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,  # a token at a time: a row is as long as the vocabulary
    )
    if wants:
        mark(params)
    generator = np.random.default_rng(number)
    prompt = tokens_input(generator.integers(5, 250, 16).tolist())
    async for output in engine.generate(prompt, params, f"exactness-{number}"):
        piece = output.outputs[0]
        if not wants or not piece.token_ids:
            continue
        kept = kept_tokens(piece.sampling_mask.token_ids if piece.sampling_mask is not None else ())
        logprobs = piece.logprobs.arrays()
        for position, (token, row) in enumerate(zip(piece.token_ids, kept.rows(), strict=True)):
            # Column 0 is the sampled token, which is among the others once more.
            finite = logprobs.logprobs[position, 1:] > -np.inf
            there = np.sort(logprobs.token_ids[position, 1:][finite])
            equal = np.array_equal(there, np.array(row))
            counts["tokens"] += 1
            counts["equal"] += equal
            counts["wrong"] += not equal
            counts["sampled_outside"] += token not in row
            counts["widest"] = max(counts["widest"], len(row))
            counts["ids"] += len(row)


if __name__ == "__main__":
    main()
