"""The heads that `step.py` compares: ours, none at all, and other people's."""

from pathlib import Path
from typing import Any

from qwen3_shape import head_benchmark
from torch import Tensor

from kept_loss import KeptLogprobs
from keptset_trainer.micro_batch import MicroBatch
from keptset_trainer.scorer import Head, kept_head


def no_head(
    hidden: Tensor, weight: Tensor, row: MicroBatch, softcap: float | None, entropy: Any, full: bool
) -> KeptLogprobs:
    """Something of the hidden states alone, for the time of everything but the head."""
    values = hidden.float().mean(-1) * 1e-3
    return KeptLogprobs(values, None, values.detach(), None, None)


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, row: MicroBatch, softcap: float | None, entropy: Any, full: bool
) -> KeptLogprobs:
    """cut-cross-entropy: logprobs over the vocabulary, no entropy."""
    from cut_cross_entropy import linear_cross_entropy

    values = -linear_cross_entropy(hidden, weight, row.labels, reduction="none").float()
    return KeptLogprobs(values, None, values.detach(), None, None)


def prime_rl(path: Path, chunk: int) -> Head:
    """prime-rl's chunked head, with entropy, from its own file."""
    head_benchmark().prime_rl(path, chunk)  # prepares what the file imports
    import types

    module = types.ModuleType("prime_rl_lm_head")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)

    def head(
        hidden: Tensor, weight: Tensor, row: MicroBatch, softcap: float | None, entropy: Any, full: bool
    ) -> KeptLogprobs:
        chunked = module._SequenceChunkedLogProbEntropyFn
        values, entropies = chunked.apply(hidden, weight, row.labels, 1 / row.temperatures, chunk)
        return KeptLogprobs(values, entropies.detach(), values.detach(), None, None)

    return head


def whole_vocabulary(
    hidden: Tensor, weight: Tensor, row: MicroBatch, softcap: float | None, entropy: Any, full: bool
) -> KeptLogprobs:
    """This repository's head without masks: every logprob over the vocabulary, chunk by chunk."""
    return kept_head(hidden, weight, row.without_masks(), softcap, entropy, full)


def spread(head: Head) -> Head:
    """Over logits as far apart as those of trained models: a deviation of about 2 instead of 0.6.

    Random weights give nearly the same probability to every token, which is the best case of a head that
    leaves out small gradients, as cut-cross-entropy does.
    """

    def wider(
        hidden: Tensor, weight: Tensor, row: MicroBatch, softcap: float | None, entropy: Any, full: bool
    ) -> KeptLogprobs:
        return head(hidden * 3, weight, row, softcap, entropy, full)

    return wider


def heads(prime: Path | None) -> dict[str, tuple[Head, Any]]:
    """Name -> (head, entropy)."""
    known: dict[str, tuple[Head, Any]] = {
        "none": (no_head, None),
        "kept": (kept_head, None),
        "kept + entropy": (kept_head, "full"),
        "whole vocabulary + entropy": (whole_vocabulary, "full"),
        "cut-cross-entropy": (cut_cross_entropy, None),
        "kept + entropy, spread": (spread(kept_head), "full"),
        "cut-cross-entropy, spread": (spread(cut_cross_entropy), None),
    }
    if prime is not None:
        known |= {
            f"prime-rl + entropy, chunk {chunk}": (prime_rl(prime, chunk), "full") for chunk in (16384, 2048)
        }
    return known
