"""The pass over the whole vocabulary, block by block: for positions without a mask, and for diagnostics."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .softcap import capped

POSITIONS_AT_ONCE = 1024
VOCABULARY_AT_ONCE = 8192
TERMS_AT_ONCE = 128
"""Of a dot product on a GPU, whose float32 matmul adds all terms one after the other."""


class WholeVocabulary(NamedTuple):
    """Softmax statistics of P positions, float64 [P]; everything of z / T.

    ``logsumexp = largest + log(total)``: kept apart, so that large logits lose nothing.
    """

    largest: Tensor
    total: Tensor
    """sum of exp(z - largest), at least 1."""
    moment: Tensor
    """sum of exp(z - largest) * (z - largest)."""
    label: Tensor
    """z of the label."""

    def label_logprobs(self) -> Tensor:
        """Never above 0: label <= largest and total >= 1."""
        return (self.label - self.largest) - self.total.log()

    def label_rest(self) -> Tensor:
        """1 - p of the label; keeps its digits where p rounds to 1, as the total is float64."""
        return (self.total - (self.label - self.largest).exp()) / self.total

    def entropy(self) -> Tensor:
        """Nats."""
        return self.total.log() - self.moment / self.total


def block_logits(
    hidden: Tensor, weight: Tensor, temperature: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Logits z / T of some positions over some of the vocabulary, [P, B].

    With a soft cap also d(capped) / d(raw), [P, B].
    """
    logits, slope = capped(product(hidden, weight.T), softcap)
    return logits.div_(temperature[:, None]), slope


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``; on a GPU in parts along the terms, so that long float32 sums keep their digits.

    A CPU's matmul works in such parts already.
    """
    terms = left.shape[1]
    if not left.is_cuda or left.dtype == torch.float64 or terms <= TERMS_AT_ONCE:
        return left @ right
    out = left[:, :TERMS_AT_ONCE] @ right[:TERMS_AT_ONCE]
    for start in range(TERMS_AT_ONCE, terms, TERMS_AT_ONCE):
        stop = start + TERMS_AT_ONCE
        out.addmm_(left[:, start:stop], right[start:stop])
    return out


def vocabulary_blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first id, rows of W in ``dtype``) over the vocabulary."""
    for start in range(0, weight.shape[0], VOCABULARY_AT_ONCE):
        yield start, weight[start : start + VOCABULARY_AT_ONCE].to(dtype)


def position_blocks(num: int) -> Iterator[slice]:
    """Slices over the positions."""
    for start in range(0, num, POSITIONS_AT_ONCE):
        yield slice(start, start + POSITIONS_AT_ONCE)


def whole_vocabulary(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, softcap: float | None
) -> WholeVocabulary:
    """Online softmax over blocks of the vocabulary; no tensor is larger than one block.

    Args:
        hidden: float32 or float64 [P, H]: the dtype of the computation.
        weight: [V, H], any dtype.
        labels: int64 [P].
        temperature: [P], as hidden.
        softcap: c of c * tanh(z / c), or None.
    """
    num = hidden.shape[0]
    state = WholeVocabulary(*hidden.new_zeros(4, num, dtype=torch.float64))
    state.largest.fill_(-torch.inf)
    for first, rows in vocabulary_blocks(weight, hidden.dtype):
        for part in position_blocks(num):
            logits, _ = block_logits(hidden[part], rows, temperature[part], softcap)
            place = labels[part] - first
            here = (place >= 0) & (place < rows.shape[0])
            label = logits.gather(1, place.clamp(0, rows.shape[0] - 1)[:, None]).squeeze(1).double()
            state.label[part] = torch.where(here, label, state.label[part])
            _merge(WholeVocabulary(*(one[part] for one in state)), logits)
    return state


def _merge(state: WholeVocabulary, logits: Tensor) -> None:
    """Take one block into the running statistics; uses up ``logits``."""
    old = state.largest.clone()
    torch.maximum(old, logits.amax(-1).double(), out=state.largest)
    shift = torch.where(old == -torch.inf, 0, old - state.largest)  # nothing to rescale in the first block
    scale = shift.exp()
    logits.sub_(state.largest.to(logits.dtype)[:, None])
    weights = logits.exp()
    state.moment.add_(state.total * shift).mul_(scale).add_(logits.mul_(weights).sum(-1, dtype=torch.float64))
    state.total.mul_(scale).add_(weights.sum(-1, dtype=torch.float64))


def block_gradient(
    logits: Tensor,
    slope: Tensor | None,
    state: WholeVocabulary,
    place: Tensor,
    grad: Tensor,
    temperature: Tensor,
) -> Tensor:
    """Gradient with respect to ``hidden @ rows.T``, [P, B]; uses up ``logits``.

    Args:
        logits: z / T, [P, B].
        slope: d(capped) / d(raw), [P, B].
        state: of these P positions.
        place: the label's column in this block; outside 0..B if it is in another one.
        grad: of the logprobs, [P].
        temperature: [P].
    """
    largest, total = state.largest.to(logits.dtype), state.total.to(logits.dtype)
    out = logits.sub_(largest[:, None]).exp_().div_(total[:, None]).neg_()
    here = (place >= 0) & (place < out.shape[1])
    column = place.clamp(0, out.shape[1] - 1)[:, None]
    rest = state.label_rest().to(out.dtype)[:, None]
    out.scatter_(1, column, torch.where(here[:, None], rest, out.gather(1, column)))
    out.mul_((grad / temperature)[:, None])
    return out if slope is None else out.mul_(slope)
