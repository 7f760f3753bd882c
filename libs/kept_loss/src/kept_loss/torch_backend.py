"""The torch backend, for any device: masked positions cost their kept ids, diagnostics and the rest V."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kept_logits as sparse
from . import vocabulary as full
from .csr import first_entry_where, positions_of, row_max, row_sum
from .entropy_sample import sampled_positions
from .softcap import capped
from .types import KeptLogprobs, KeptSet


def kept_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    kept: KeptSet,
    temperature: Tensor,
    *,
    softcap: float | None,
    entropy: Literal["full"] | float | None,
    full_logprobs: bool,
) -> KeptLogprobs:
    """As :func:`kept_loss.kept_logprobs`, which has verified the arguments."""
    outputs = _KeptLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, kept.ids, kept.offsets, temperature, softcap, entropy, full_logprobs
    )
    return KeptLogprobs(*outputs)


class _KeptLogprobs(torch.autograd.Function):
    """Saves hidden, weight, M numbers for the kept ids, four for each unmasked position: nothing of N x V."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ids: Tensor,
        offsets: Tensor,
        temperature: Tensor,
        softcap: float | None,
        entropy: Literal["full"] | float | None,
        full_logprobs: bool,
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
            num = hidden.shape[0]
            h, t = hidden.to(dtype), temperature.to(dtype)
            positions = positions_of(offsets, ids.numel())
            rows = _kept_rows(h, weight, labels, ids, offsets, positions, t, softcap)

            # Positions without a mask run by themselves, in the blocks in which backward computes their
            # logits again: so those are the same to the bit, and diagnostics change no logprob.
            unmasked = offsets[1:] == offsets[:-1]
            alone = unmasked.nonzero().squeeze(1)  # [U]
            state = full.whole_vocabulary(h[alone], weight, labels[alone], t[alone], softcap)
            rows.logprobs[alone] = state.label_logprobs()
            rows.entropy[alone] = state.entropy()

            sampled = sampled_positions(num, entropy, hidden.device)
            looked_at = torch.ones_like(sampled) if full_logprobs else sampled
            diagnosed = (looked_at & ~unmasked).nonzero().squeeze(1)
            seen = full.whole_vocabulary(h[diagnosed], weight, labels[diagnosed], t[diagnosed], softcap)
            # A set of nearly all the probability may round past 1.
            mass = rows.mass(diagnosed, seen).clamp(max=1)
            nowhere = rows.logprobs.new_full((num,), torch.nan)
            entropy_all = nowhere.index_copy(0, alone, state.entropy()).index_copy(
                0, diagnosed, seen.entropy()
            )
            mass_all = nowhere.index_fill(0, alone, 1).index_copy(0, diagnosed, mass)
            label_all = rows.logprobs.index_copy(0, diagnosed, seen.label_logprobs())

            def where(chosen: Tensor, values: Tensor) -> Tensor:
                return values.masked_fill(~chosen, torch.nan).to(dtype)

            outputs = (
                rows.logprobs.to(dtype),
                None if entropy is None else where(sampled, entropy_all),
                rows.entropy.to(dtype),
                None if entropy is None and not full_logprobs else where(looked_at, mass_all),
                label_all.to(dtype) if full_logprobs else None,
            )

        ctx.mark_non_differentiable(*(one for one in outputs[1:] if one is not None))
        ctx.set_materialize_grads(False)
        ctx.softcap = softcap
        slopes = rows.slopes.to(dtype)
        ctx.save_for_backward(hidden, weight, labels, ids, offsets, temperature, slopes, alone, *state)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 7
        if grads[0] is None:
            return None, None, *nothing
        hidden, weight, labels, ids, offsets, temperature, slopes, alone, *state = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = slopes.dtype
            h, grad = hidden.to(dtype), grads[0].to(dtype)
            positions = positions_of(offsets, ids.numel())
            grad_logits = slopes * grad[positions]  # [M]
            need_hidden, need_weight = ctx.needs_input_grad[:2]

            grad_hidden = torch.zeros_like(h) if need_hidden else None
            if grad_hidden is not None:
                sparse.add_hidden_gradient(grad_hidden, weight, ids, offsets, positions, grad_logits)
            by_id = sparse.WeightGradient(h, ids, positions, grad_logits) if need_weight else None
            grad_weight = torch.zeros_like(weight) if need_weight else None
            if alone.numel():
                unmasked_gradient(
                    h, weight, labels, temperature.to(dtype), alone, full.WholeVocabulary(*state),
                    ctx.softcap, grad, grad_hidden, grad_weight, by_id,
                )  # fmt: skip
            elif grad_weight is not None and by_id is not None:
                step = sparse.chunk_of(weight.shape[1], weight.device)
                for start in range(0, by_id.ids.numel(), step):
                    stop = min(start + step, by_id.ids.numel())
                    grad_weight[by_id.ids[start:stop]] = by_id.rows(start, stop).to(weight.dtype)
            return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, *nothing


class _KeptRows(NamedTuple):
    """Of the masked positions, float64; entries of unmasked positions mean nothing."""

    logprobs: Tensor
    """[N]."""
    entropy: Tensor
    """[N]."""
    largest: Tensor
    """Largest z / T of the set, [N]."""
    log_total: Tensor
    """Log of the sum of exp(z / T - largest), [N]."""
    slopes: Tensor
    """d(logprob) / d(raw logit), [M]."""

    def mass(self, at: Tensor, all_ids: full.WholeVocabulary) -> Tensor:
        """Probability of the kept sets of the positions ``at`` [P], under the whole vocabulary."""
        return ((self.largest[at] - all_ids.largest) + (self.log_total[at] - all_ids.total.log())).exp()


def _kept_rows(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    ids: Tensor,
    offsets: Tensor,
    positions: Tensor,
    t: Tensor,
    softcap: float | None,
) -> _KeptRows:
    """Everything of the masked positions; in float64 once the logits are there, which are few."""
    num = h.shape[0]
    raw = sparse.kept_logits(h, weight, ids, positions, h.dtype)
    logits, slope = capped(raw.double(), softcap)  # [M]
    scale = t.double()[positions]
    scaled = logits / scale
    largest = row_max(scaled, positions, num)  # [N]
    below = scaled - largest[positions]  # [M], <= 0, 0 at the largest
    weights = below.exp()
    # The largest entry has weight exactly 1: sum the others, so that log1p keeps them however small they are,
    # and the logprob below is a sum of two terms <= 0. No clamp is needed to keep it from rounding above 0.
    first = first_entry_where(below == 0, positions, num)
    is_first = torch.arange(ids.numel(), device=ids.device) == first[positions]
    others = row_sum(weights.masked_fill(is_first, 0), offsets)  # [N]
    log_total = others.log1p()
    is_label = ids == labels[positions]
    logprobs = row_sum(below.masked_fill(~is_label, 0), offsets) - log_total

    probabilities = weights / (1 + others)[positions]
    entropy = log_total - row_sum(probabilities * below, offsets)
    # d/dz: 1 - p at the label is the sum of the others' p, which is exact where 1 - p would cancel: 0 for a
    # singleton.
    rest = row_sum(probabilities.masked_fill(is_label, 0), offsets)
    slopes = torch.where(is_label, rest[positions], -probabilities) / scale
    return _KeptRows(logprobs, entropy, largest, log_total, slopes if slope is None else slopes * slope)


def unmasked_gradient(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    t: Tensor,
    alone: Tensor,
    state: full.WholeVocabulary,
    softcap: float | None,
    grad: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    by_id: "sparse.WeightGradient | None",
) -> None:
    """Add the gradients of the positions ``alone`` [U]; logits are computed again, block by block.

    With a gradient of W each block's rows are summed in ``h``'s dtype, the masked positions' part (``by_id``)
    included, and rounded to W's dtype once.
    """
    hidden, label, heat, gradient = h[alone], labels[alone], t[alone], grad[alone]
    out = torch.zeros_like(hidden)
    for first, rows in full.vocabulary_blocks(weight, h.dtype):
        block = torch.zeros_like(rows) if grad_weight is not None else None
        for part in full.position_blocks(alone.numel()):
            logits, slope = full.block_logits(hidden[part], rows, heat[part], softcap)
            here = full.WholeVocabulary(*(one[part] for one in state))
            d = full.block_gradient(logits, slope, here, label[part] - first, gradient[part], heat[part])
            out[part] += full.product(d, rows)
            if block is not None:
                block += full.product(d.T, hidden[part])
        if grad_weight is not None and block is not None and by_id is not None:
            bounds = torch.tensor([first, first + rows.shape[0]], device=weight.device)
            start, stop = torch.searchsorted(by_id.ids, bounds).tolist()
            block[by_id.ids[start:stop] - first] += by_id.rows(start, stop)
            grad_weight[first : first + rows.shape[0]] = block.to(weight.dtype)
    if grad_hidden is not None:
        grad_hidden[alone] += out
