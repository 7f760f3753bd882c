"""What a float32 LM head changes: the engine's logprobs against a trainer's, at the same weights.

    python benchmarks/head.py --model SMOLLM2_DIRECTORY [--output benchmarks/results/head-h200.json]
    python benchmarks/head.py --model TINY --prompts 4 --tokens 16 --cpu

The same requests, once with `inference.fp32_lm_head` and once without, on engines that run side by side. The
trainer's side is transformers with its own attention, in the model's type, and the kept-set logprob of
`kept_loss`, which multiplies hidden states and rows of the head in float32 in any case.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import sample
import torch

from kept_loss import KeptSet, kept_logprobs

HEADS: dict[str, list[str]] = {"as the model": [], "float32": ["--fp32-lm-head"]}


def main() -> None:
    """Sample twice, score, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sample.options(parser)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keptset-benchmark-") as folder:
        files = {name: Path(folder) / f"{place}.npz" for place, name in enumerate(HEADS)}
        processes = [sample.start(args, files[name], *more, engine={}) for name, more in HEADS.items()]
        if any([process.wait() for process in processes]):
            sys.exit("an engine failed; its log is above")
        results = {name: mismatch(args.model, dict(np.load(file)), args.cpu) for name, file in files.items()}
    for name, found in results.items():
        print(name, found, flush=True)
    if args.output is not None:
        head = {"model": Path(args.model).name, "capture": args.capture, "sampling": args.sampling}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


@torch.no_grad()
def mismatch(directory: str, sampled: dict[str, np.ndarray], cpu: bool) -> dict[str, float]:
    """How far the trainer's logprobs are from the engine's."""
    from transformers import AutoModelForCausalLM

    device = "cpu" if cpu else "cuda"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32 if cpu else "auto").to(device)
    prompt = sampled["prompts"].shape[1]
    starts = np.concatenate([[0], np.cumsum(sampled["counts"])])
    each = sampled["tokens"].shape[1]
    logs = []
    for row, (before, tokens, logprobs) in enumerate(
        zip(sampled["prompts"], sampled["tokens"], sampled["logprobs"], strict=True)
    ):
        ids = torch.tensor(np.concatenate([before, tokens]), device=device)[None]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, prompt - 1 : -1]
        part = slice(row * each, (row + 1) * each)
        kept = KeptSet.from_arrays(
            sampled["ids"][starts[part.start] : starts[part.stop]], sampled["counts"][part], device
        )
        labels, one = torch.tensor(tokens, device=device), torch.ones(each, device=device)
        scored = kept_logprobs(hidden, model.lm_head.weight, labels, kept, one, entropy=None).logprobs
        logs.append(scored.double().cpu().numpy() - logprobs)
    log_ratio = np.concatenate(logs)
    return {
        "tokens": len(log_ratio),
        "mean_set": round(float(sampled["counts"].mean()), 2),
        "mismatch_kl": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "mean_abs_log_ratio": float(np.mean(np.abs(log_ratio))),
        "max_abs_log_ratio": float(np.abs(log_ratio).max()),
        "mean_log_ratio": float(np.mean(log_ratio)),
    }


if __name__ == "__main__":
    main()
