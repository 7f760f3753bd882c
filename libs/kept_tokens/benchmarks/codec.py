"""How long checking and encoding take: 1 million tokens with 8 million kept ids, all checks on.

    python libs/kept_tokens/benchmarks/codec.py

Prints a table and writes results/codec.json beside this file. One core; the best of five repetitions.
"""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kept_tokens import KeptTokens
from kept_tokens.messages import TrainingBatch, TrainingSample, check_batch, decode, encode

TOKENS, IDS, VOCABULARY, SAMPLES = 1_000_000, 8_000_000, 151_936, 1000


def draw(rng: np.random.Generator) -> tuple[KeptTokens, np.ndarray]:
    """Sets like published ones: half singletons, a long tail, at most 512 wide; and a sampled id of each."""
    counts = np.where(rng.random(TOKENS) < 0.5, 1, np.minimum(rng.geometric(1 / 15, TOKENS), 512)).astype(
        np.int64
    )
    while (missing := IDS - counts.sum()) != 0:  # exactly IDS
        chosen = rng.integers(0, TOKENS, abs(missing))
        np.add.at(counts, chosen, np.sign(missing))
        counts = np.clip(counts, 1, 512)
    steps = rng.integers(1, VOCABULARY // 512, IDS)  # ascending inside a set: sums of steps since its start
    offsets = np.concatenate([[0], np.cumsum(counts)])
    running = np.cumsum(steps)
    before = np.concatenate([[0], running])[offsets[:-1]]
    ids = running - np.repeat(before, counts)
    return KeptTokens(ids, counts), ids[offsets[:-1] + rng.integers(0, counts)]


def shuffled(kept: KeptTokens, rng: np.random.Generator) -> KeptTokens:
    """The same sets, ids in any order."""
    order = np.lexsort((rng.random(len(kept.ids)), np.repeat(np.arange(len(kept)), kept.counts)))
    return KeptTokens(kept.ids[order], kept.counts)


def batch_of(kept: KeptTokens, sampled: np.ndarray) -> TrainingBatch:
    """All tokens as SAMPLES samples of equal length; the first token of each is context."""
    length = TOKENS // SAMPLES
    samples = []
    for number in range(SAMPLES):
        start = number * length
        loss_mask = np.ones(length, np.uint8)
        loss_mask[0] = 0
        samples.append(
            TrainingSample.build(
                token_ids=sampled[start : start + length],
                loss_mask=loss_mask,
                logprobs=np.where(loss_mask, -0.5, 0),
                temperatures=np.ones(length),
                advantages=np.ones(length),
                kept=kept.slice(start + 1, start + length).pad_tokens(1, 0),
                must_have_masks=True,
                source="benchmark",
                group=str(number // 8),
                sample_id=str(number),
                weight_versions=[(0, 1, length)],
            )
        )
    return TrainingBatch.build(1, samples)


def best_of_five(run: Callable[[], object]) -> float:
    """Seconds."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Measure, print, write."""
    rng = np.random.default_rng(0)
    kept, sampled = draw(rng)
    unsorted = shuffled(kept, rng)
    batch = batch_of(kept, sampled)
    raw, raw_unsorted, text, message = kept.to_bytes(), unsorted.to_bytes(), kept.to_base64(), encode(batch)

    def checked(payload: KeptTokens) -> KeptTokens:
        return payload.check(TOKENS, VOCABULARY, sampled, require_masks=True)

    cases: dict[str, Callable[[], object]] = {
        "from_bytes and every check, ascending ids": lambda: checked(KeptTokens.from_bytes(*raw)),
        "from_bytes and every check, unsorted ids": lambda: checked(KeptTokens.from_bytes(*raw_unsorted)),
        "to_bytes": kept.to_bytes,
        "from_base64 and every check, ascending ids": lambda: checked(KeptTokens.from_base64(text)),
        "to_base64": kept.to_base64,
        "sorted, from unsorted ids": unsorted.sorted,
        f"encode a TrainingBatch of {SAMPLES} samples": lambda: encode(batch),
        f"decode and check_batch of {SAMPLES} samples": lambda: check_batch(
            decode(message, TrainingBatch), VOCABULARY
        ),
    }
    seconds = {name: round(best_of_five(run), 4) for name, run in cases.items()}
    for name, value in seconds.items():
        print(f"{value * 1000:8.1f} ms  {name}")
    result = {
        "command": "python libs/kept_tokens/benchmarks/codec.py",
        "tokens": TOKENS,
        "ids": IDS,
        "seconds": seconds,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, one core",
    }
    path = Path(__file__).parent / "results" / "codec.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
