"""Kept sets with tensor parallel 2 against those without: the same prompts, the first tokens' sets.

    python benchmarks/tensor_parallel.py --model DIR [--output benchmarks/results/tensor-parallel-h200.json]
    python benchmarks/tensor_parallel.py --model TINY --prompts 16 --cpu

In float32, where two ways of adding up the same products differ in the last digits: an id may change sides
where it is at the border of top_p to that precision, and nowhere else. Both captures on a GPU.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import sample

MOST = 2
"""Ids by which a set may differ: at the border one may take another's place."""


def main() -> None:
    """Sample with one rank and with two, compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sample.options(parser)
    parser.set_defaults(prompts=256, tokens=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="keptset-benchmark-") as folder:
        runs = [
            (capture, ranks) for capture in (["v1"] if args.cpu else ["v1", "native"]) for ranks in (1, 2)
        ]
        files = {run: Path(folder) / f"{run[0]}-{run[1]}.npz" for run in runs}
        processes = []
        for capture, ranks in runs:
            args.capture = capture
            engine = {"tensor_parallel_size": ranks, "dtype": "float32", "enforce_eager": True}
            processes.append(sample.start(args, files[capture, ranks], engine=engine))
        codes = dict(zip(runs, [process.wait() for process in processes], strict=True))
        for capture in dict.fromkeys(capture for capture, _ in runs):
            if any(codes[capture, ranks] for ranks in (1, 2)):
                results[capture] = {"failed": [codes[capture, ranks] for ranks in (1, 2)]}
            else:
                one, two = (dict(np.load(files[capture, ranks])) for ranks in (1, 2))
                results[capture] = compare(one, two)
    for name, found in results.items():
        print(name, found, flush=True)
    if args.output is not None:
        head = {"model": Path(args.model).name, "sampling": args.sampling, "dtype": "float32"}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")
    sys.exit(
        not all("failed" not in found and found["ids_that_differ"] <= MOST for found in results.values())
    )


def compare(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> dict[str, Any]:
    """Sets position by position, and the logprobs of tokens that both sampled."""
    assert np.array_equal(one["prompts"], two["prompts"])
    rows = [np.split(run["ids"], np.cumsum(run["counts"])[:-1]) for run in (one, two)]
    differences = [len(np.setxor1d(a, b)) for a, b in zip(*rows, strict=True)]
    same = (one["tokens"] == two["tokens"]).ravel()
    apart = np.abs(one["logprobs"] - two["logprobs"]).ravel()[same]
    return {
        "sets": len(differences),
        "equal": differences.count(0),
        "ids_that_differ": max(differences),
        "mean_set": round(float(one["counts"].mean()), 2),
        "tokens_equal": int(same.sum()),
        "logprobs_apart": float(apart.max(initial=0)),
    }


if __name__ == "__main__":
    main()
