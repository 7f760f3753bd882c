"""Samples from an engine of ours and writes down what came: for the scripts that compare engines.

    python benchmarks/sample.py --model DIR --capture v1 --prompts 64 --tokens 256 --output FILE.npz
        [--sampling '{"top_p": 0.97, "top_k": 512}'] [--fp32-lm-head] [--engine '{"tensor_parallel_size": 2}']

The file: `prompts` [N, P], `tokens` and `logprobs` [N, T], and the sets of all tokens, request after request
(`ids`, `counts`). Prompts and seeds of requests depend on their number only.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from arms import ARMS, shared_memory

PROMPT = 24
SAMPLING = {"temperature": 1.0, "top_p": 0.97, "top_k": 512}


def options(parser: argparse.ArgumentParser) -> None:
    """What the scripts that compare engines are told as well, and pass on."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--capture", default="v1", choices=["v1", "native"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a completion")
    parser.add_argument("--sampling", type=json.loads, default=SAMPLING)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--cpu", action="store_true", help="does the script run?")


def start(
    args: argparse.Namespace, output: Path, *more: str, engine: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """This script in a process of its own, with the options of another one and some engine arguments more."""
    command = [sys.executable, __file__, "--output", str(output), *more]
    for name in ("model", "capture", "prompts", "tokens"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--sampling", json.dumps(args.sampling), "--engine", json.dumps(args.engine | engine)]
    if args.cpu:
        command.append("--cpu")
    environment = ARMS[f"capture {args.capture}"].environment(output.with_suffix(".cache"))
    return subprocess.Popen(command, env=environment)


async def main() -> None:
    """Sample and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options(parser)
    parser.add_argument("--fp32-lm-head", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    from keptset_inference.environment import prepare_environment
    from keptset_settings import InferenceSettings

    engine: dict[str, Any] = {
        "max_model_len": PROMPT + args.tokens + 8,
        "max_num_seqs": args.prompts,
        "seed": 0,
    }
    engine |= {"dtype": "float32"} if args.cpu else shared_memory(4)
    settings = InferenceSettings(
        model=args.model,
        enable_return_sampling_mask=True,
        capture=args.capture,
        fp32_lm_head=args.fp32_lm_head,
        mask_padded_ids=False,
        vllm=engine | args.engine,
    )
    prepare_environment(settings)
    from keptset_inference.arguments import engine_arguments
    from keptset_inference.engine import running_engine

    arguments = engine_arguments(settings)
    async with running_engine(arguments, capture=args.capture, mask_padded_ids=False) as running:
        found = await asyncio.gather(*(one(running, args, number) for number in range(args.prompts)))
    names = ("prompts", "tokens", "logprobs", "ids", "counts")
    prompts, tokens, logprobs, ids, counts = zip(*found, strict=True)
    arrays = (
        np.array(prompts),
        np.array(tokens),
        np.array(logprobs),
        np.concatenate(ids),
        np.concatenate(counts),
    )
    np.savez(args.output, **dict(zip(names, arrays, strict=True)))


async def one(
    engine: Any, args: argparse.Namespace, number: int
) -> tuple[list[int], list[int], np.ndarray, np.ndarray, np.ndarray]:
    """A request: its prompt, tokens, logprobs, and the ids and counts of its sets."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from keptset_inference.capture.flag import mark
    from keptset_inference.capture.packed import unpack_rows

    params = SamplingParams(
        **args.sampling,
        seed=number,
        logprobs=0,
        max_tokens=args.tokens,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    mark(params)
    prompt = np.random.default_rng(number).integers(5, 250, PROMPT).tolist()
    async for output in engine.generate(tokens_input(prompt), params, f"sample-{number}"):
        last = output.outputs[0]
    _, logprobs, kept = unpack_rows(last.sampling_mask.token_ids)
    kept.check(num_tokens=args.tokens, sampled_ids=last.token_ids, require_masks=True)
    return prompt, list(last.token_ids), logprobs, kept.ids, kept.counts


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # the engine has ended; taking the interpreter apart only complains
