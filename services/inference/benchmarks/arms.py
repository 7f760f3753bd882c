"""What is compared: how a server or engine is started and what is asked of it; and how pairs are judged."""

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
FLASHINFER = "VLLM_USE_FLASHINFER_SAMPLER"


@dataclass(frozen=True)
class Arm:
    """One way to serve."""

    ours: bool
    """Our service; otherwise vLLM as it comes."""
    runner: str
    """V1 or V2, vLLM's model runner."""
    capture: str | None = None
    """`inference.capture`; None: off."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments beside the common ones."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters beside the common ones."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, beside the common ones."""

    def environment(self, cache: Path) -> dict[str, str]:
        """Of the process that samples.

        Args:
            cache: where vLLM keeps what it compiles: a directory of its own, since all arms start at the same
                time.
        """
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        arm = {RUNNER: {"V1": "0", "V2": "1"}[self.runner], "VLLM_CACHE_ROOT": str(cache)}
        return quiet | os.environ | offline | arm | self.variables


ARMS = {
    "off V1": Arm(ours=True, runner="V1"),
    "capture v1": Arm(ours=True, runner="V1", capture="v1"),
    "off V2": Arm(ours=True, runner="V2"),
    "capture native": Arm(ours=True, runner="V2", capture="native"),
    "stock masks": Arm(
        ours=False,
        runner="V2",
        engine={"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"},
    ),
    "stock logprobs=512": Arm(
        ours=False,
        runner="V2",
        engine={"max_logprobs": 512, "logprobs_mode": "processed_logprobs"},
        sampling={"logprobs": 512},
    ),
    "stock defaults": Arm(ours=False, runner="V2", variables={FLASHINFER: "0"}),
    "stock FlashInfer": Arm(ours=False, runner="V2", variables={FLASHINFER: "1"}),
}
"""By name. `stock logprobs=512` is the only way to the sets without a patch; `stock FlashInfer` has
vLLM's defaults, raw logprobs and its fastest sampler, and no sets; `stock defaults` the same without
FlashInfer, which is not everywhere."""

EVERYWHERE = [name for name in ARMS if name != "stock FlashInfer"]

PAIRS = [
    ("capture v1", "off V1"),
    ("capture native", "off V2"),
    ("capture v1", "stock masks"),
    ("capture native", "stock masks"),
    ("capture native", "stock logprobs=512"),
    ("stock masks", "off V2"),
    ("stock logprobs=512", "off V2"),
    ("stock defaults", "off V2"),
    ("stock FlashInfer", "off V2"),
    ("stock FlashInfer", "stock defaults"),
    ("capture native", "stock FlashInfer"),
]
"""(arm, compared with)."""

SETS = {
    "about 8": {"temperature": 1.0, "top_p": 0.95, "top_k": 512},
    "512": {"temperature": 1.0, "top_p": 1.0, "top_k": 512},
}
"""Sampling parameters by how large kept sets become."""


def interval(ratios: list[float]) -> dict[str, float]:
    """Geometric mean of the pairs' ratios and its 95 % interval, by resampling the pairs; and their median,
    which a run that something held up does not move.
    """
    logs = np.log(np.asarray(ratios))
    drawn = np.random.default_rng(0).choice(logs, (10_000, len(logs)))
    low, high = np.exp(np.percentile(drawn.mean(1), [2.5, 97.5]))
    return {
        "pairs": len(ratios),
        "ratio": round(float(np.exp(logs.mean())), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "median": round(float(np.exp(np.median(logs))), 4),
    }


def compare(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Ratios of tokens a second of the pairs of which both arms ran; runs of one round belong together."""
    found = {}
    for arm, other in PAIRS:
        pairs = list(zip(rates.get(arm, ()), rates.get(other, ()), strict=False))
        if pairs:
            found[f"{arm} / {other}"] = interval([a / b for a, b in pairs])
    return found


def order(names: list[str], round_: int) -> list[str]:
    """Every other round backwards, so that what drifts hits all alike."""
    return names if round_ % 2 == 0 else names[::-1]


def shares(args: argparse.Namespace, start: float) -> list[tuple[str, float]]:
    """Each of `--sets` and until when its rounds may start: equal parts of what starting has left."""
    sets, now = args.sets.split(","), time.monotonic()
    left = start + args.budget_seconds - now
    return [(name, now + left * place / len(sets)) for place, name in enumerate(sets, start=1)]


def options(description: str | None, arms: list[str]) -> argparse.ArgumentParser:
    """What all comparisons are told on the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--arms", default=",".join(arms))
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--budget-seconds", type=float, default=500, help="no round starts after this")
    parser.add_argument("--cache-gib", type=float, default=10, help="key-value cache of each engine")
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--cpu", action="store_true", help="does the script run?")
    parser.add_argument("--output", type=Path)
    return parser


def common_arguments(args: argparse.Namespace, arm: Arm) -> dict[str, Any]:
    """Of the engine of an arm, from the command line of `options`.

    The size of the cache is given and not measured, so that engines that share a GPU can start at the same
    time.
    """
    engine: dict[str, Any] = {"max_model_len": args.prompt + args.tokens + 16, "max_num_seqs": args.requests}
    engine |= {"enable_prefix_caching": False, "seed": 0}
    engine |= {"dtype": "float32"} if args.cpu else shared_memory(args.cache_gib)
    return engine | arm.engine | args.engine


def write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """What there is so far, to `--output`."""
    if args.output is None:
        return
    head = {"model": Path(args.model).name, "requests": args.requests, "tokens": args.tokens}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


def shared_memory(cache_gib: float) -> dict[str, Any]:
    """Engine arguments with which several engines share a GPU."""
    return {"kv_cache_memory_bytes": int(cache_gib * 2**30), "gpu_memory_utilization": 0.05}


__all__ = [
    "ARMS",
    "EVERYWHERE",
    "PAIRS",
    "SETS",
    "Arm",
    "common_arguments",
    "compare",
    "interval",
    "options",
    "order",
    "shared_memory",
    "shares",
    "write",
]
