"""What the engine should have done, computed without it: transformers for the logits, float64 for the cut.

The order is vLLM's (v1/sample/sampler.py and v1/sample/ops/topk_topp_sampler.py): masks, temperature,
min_p, top_k, top_p over what top_k left. Every cut compares something with a threshold, and its margin
is the distance to that threshold in the unit in which float32 noise acts on it:

* min_p: log p(id) - log(min_p * p(best)), in nats;
* top_k: logit / T of the id against the first one on the other side of the cut, in nats;
* top_p: the mass of everything ranked above the id against top_p, in probability.

An id whose margin is below the tolerance may fall on either side, and what follows depends on where it
fell: min_p dropping an id moves the masses that top_p adds up. So the answer is not a set and a list of
excused ids, but the few whole sets that are right.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

MARGIN = 1e-5
"""Ids that close to a cutoff may fall on either side."""

_MOST_AT_THE_BORDER = 8


@dataclass(frozen=True)
class Cut:
    """What limits the support of one request, neutral where unset."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling_params: dict) -> "Cut":
        """The cut that the sampling_params of a request to generate ask for."""
        names = ("temperature", "top_p", "top_k", "min_p")
        return cls(**{name: sampling_params[name] for name in names if name in sampling_params})


class Reference:
    """One model of transformers in float32 and, for margins and logprobs, in float64."""

    def __init__(self, directory: Path):
        self._single = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._double = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
        self.vocab_size: int = self._single.config.vocab_size

    @torch.inference_mode()
    def logits(self, prompt: list[int], completion: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """[T, V] float32 and [T, V] float64: what each token of the completion was sampled from."""
        ids, first = torch.tensor([[*prompt, *completion]]), len(prompt) - 1
        return tuple(model(ids).logits[0, first:-1].numpy() for model in (self._single, self._double))


def exact_set(logits: np.ndarray, cut: Cut, allowed: np.ndarray | None = None) -> np.ndarray:
    """The kept ids, ascending; of ids tied at the top_k border the lowest. `allowed`: bool [V] or None."""
    (only,) = acceptable_sets(logits, cut, allowed, margin=0.0)
    return np.array(sorted(only))


def acceptable_sets(
    logits: np.ndarray, cut: Cut, allowed: np.ndarray | None = None, margin: float = MARGIN
) -> set[frozenset[int]]:
    """Every set that moving ids within `margin` of a cutoff to its other side gives; exact set included."""
    scaled = logits.astype(np.float64) / cut.temperature
    if allowed is not None:
        scaled = np.where(allowed, scaled, -np.inf)
    candidates = np.flatnonzero(np.isfinite(scaled))
    if 0 < cut.top_k < len(candidates) - _MOST_AT_THE_BORDER:  # sort no more than can matter, with all ties
        beyond = cut.top_k + _MOST_AT_THE_BORDER
        candidates = np.flatnonzero(scaled >= -np.partition(-scaled, beyond)[beyond])
    ranked = candidates[np.argsort(-scaled[candidates], kind="stable")]  # of equal ones the lowest id first
    value = scaled[ranked]

    sets = set()
    for after_min_p in _min_p(value, cut.min_p, margin):
        for after_top_k in _top_k(value, after_min_p, cut.top_k, margin):
            for kept in _top_p(value, after_top_k, cut.top_p, margin):
                sets.add(frozenset(ranked[kept].tolist()))
    return sets


# Below, sets are ascending arrays of ranks: rank 0 has the largest logit.


def _min_p(value: np.ndarray, min_p: float, margin: float) -> list[np.ndarray]:
    if min_p <= 0:
        return [np.arange(len(value))]
    distance = value - (value[0] + np.log(min_p))
    close = np.flatnonzero((np.abs(distance) < margin) & (value < value[0]))
    sure = np.setdiff1d(np.flatnonzero(distance >= 0), close)
    _bounded(close)
    return [
        np.union1d(sure, chosen).astype(int)
        for size in range(len(close) + 1)
        for chosen in combinations(close, size)
    ]


def _top_k(value: np.ndarray, ranks: np.ndarray, k: int, margin: float) -> list[np.ndarray]:
    """The k best of these ranks, and what swapping those within the margin at the border gives."""
    if k <= 0 or k >= len(ranks):
        return [ranks]
    inside, outside = ranks[:k], ranks[k:]
    swap_out = inside[value[inside] - value[outside[0]] < margin]
    swap_in = outside[value[inside[-1]] - value[outside] < margin]
    if not len(swap_out) or not len(swap_in):
        return [inside]
    close = np.union1d(swap_out, swap_in)
    sure = np.setdiff1d(inside, swap_out)
    _bounded(close)
    return [np.union1d(sure, chosen).astype(int) for chosen in combinations(close, k - len(sure))]


def _top_p(value: np.ndarray, ranks: np.ndarray, top_p: float, margin: float) -> list[np.ndarray]:
    """Everything with less than top_p above it, the best always."""
    if top_p >= 1:
        return [ranks]
    mass = np.exp(value[ranks] - value[ranks[0]])
    mass /= mass.sum()
    above = np.cumsum(mass) - mass
    sure = max(1, int((above < top_p - margin).sum()))
    possible = max(1, int((above < top_p + margin).sum()))
    _bounded(range(sure, possible))
    return [kept for size in range(sure, possible + 1) for kept in _top_k(value, ranks, size, margin)]


def _bounded(close) -> None:
    assert len(close) <= _MOST_AT_THE_BORDER, f"{len(close)} ids at a border: compare with exact_set instead"
