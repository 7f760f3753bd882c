"""Seconds of the parts of a step, of two runs that differ in one thing: is a loop with replay slower?

    keptset run plain.toml; keptset run replay.toml     # the same but for top_p and top_k
    python benchmarks/loop_time.py runs/plain runs/replay [--skip 3]

Reads the rows that the orchestrator leaves in metrics.jsonl. Answers differ in length between runs: rollouts
are compared by the token too.
"""

import argparse
import json
import statistics
from pathlib import Path

PARTS = ("seconds/rollout", "seconds/train", "seconds/weights", "seconds/step")


def medians(run: Path, skip: int) -> dict[str, float]:
    """Of the steps after the first `skip`, in which things are compiled and allocated."""
    (path,) = run.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()][skip:]
    if not rows:
        raise SystemExit(f"{path}: holds no more than the {skip} steps that are left out; lower --skip")
    values = {part: statistics.median(row[part] for row in rows) for part in PARTS}
    rates = [1e6 * row["seconds/rollout"] / row["rollout/tokens"] for row in rows]
    return values | {"microseconds/rollout token": statistics.median(rates)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("without", type=Path)
    parser.add_argument("replay", type=Path)
    parser.add_argument("--skip", type=int, default=3)
    options = parser.parse_args()
    before, after = medians(options.without, options.skip), medians(options.replay, options.skip)
    print("| median of a step | without | with replay | ratio |\n|---|---|---|---|")
    for part, value in before.items():
        print(f"| {part} | {value:.3f} | {after[part]:.3f} | {after[part] / value:.3f} |")


if __name__ == "__main__":
    main()
