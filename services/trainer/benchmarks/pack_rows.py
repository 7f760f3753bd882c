"""How long the host packs a row of 16,384 tokens, for which a step's first kernel waits. Needs no GPU.

    python benchmarks/pack_rows.py [--rounds 50]

One thread; kept sets as published (mean about 8). Medians, and the fastest.
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
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            (row,) = list(pack(samples, size.tokens))
            times.append((time.perf_counter() - began) * 1e3)
        print(
            f"{shape:4}{len(samples):4} sequences, {len(row.kept.ids)} kept ids: "
            f"{statistics.median(times):.2f} ms, fastest {min(times):.2f}"
        )


if __name__ == "__main__":
    main()
