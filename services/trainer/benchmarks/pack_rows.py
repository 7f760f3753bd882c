"""How long the host packs a row of 16,384 tokens. Needs no GPU.

    python benchmarks/pack_rows.py [--rounds 50]

A step's first kernel waits for the sequences; labels are packed while the device is at the body. One thread;
kept sets as published (mean about 8). Medians, and the fastest.
"""

import argparse
import statistics
import time

import torch
from qwen3_shape import Size, lengths_of, samples_of

from keptset_trainer.packing import pack


def main() -> None:
    """Pack the same samples again and again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    size = Size()
    for shape in ("16x", "4x", "1x"):
        samples = samples_of(lengths_of(shape, size.tokens), size.vocabulary, 0)
        times: dict[str, list[float]] = {"sequences": [], "labels": []}
        for _ in range(rounds):
            began = time.perf_counter()
            begun = pack(samples, size.tokens).begun(0)
            packed = time.perf_counter()
            row = begun.labelled()
            times["sequences"].append((packed - began) * 1e3)
            times["labels"].append((time.perf_counter() - packed) * 1e3)
        said = ", ".join(
            f"{name} {statistics.median(taken):.2f} ms, fastest {min(taken):.2f}"
            for name, taken in times.items()
        )
        print(f"{shape:4}{len(samples):4} sequences, {len(row.kept.ids)} kept ids: {said}")


if __name__ == "__main__":
    main()
