"""The torch backend, for any device: masked positions cost their kept ids, diagnostics and the rest V."""

from typing import Any, Literal

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
            logprobs, entropy_kept, logsumexp_kept, slopes = rows

            # The pass over the vocabulary, for those that need it.
            unmasked = offsets[1:] == offsets[:-1]
            sampled = sampled_positions(num, entropy, hidden.device)
            diagnosed = torch.ones_like(sampled) if full_logprobs else sampled
            at = (unmasked | diagnosed).nonzero().squeeze(1)  # [P]
            state = full.whole_vocabulary(h[at], weight, labels[at], t[at], softcap)
            free = unmasked[at]
            logprobs[at] = torch.where(free, state.label_logprobs(), logprobs[at])
            entropy_kept[at] = torch.where(free, state.entropy(), entropy_kept[at])

            def diagnosis(values: Tensor, where: Tensor) -> Tensor:
                return (
                    values.new_full((num,), torch.nan)
                    .index_copy_(0, at, values)
                    .masked_fill_(~where, torch.nan)
                    .to(dtype)
                )

            mass = (
                (logsumexp_kept[0][at] - state.largest) + (logsumexp_kept[1][at] - state.total.log())
            ).exp()
            mass = mass.clamp(max=1)  # a set of nearly all the probability may round past 1
            mass = torch.where(free, 1, mass)
            outputs = (
                logprobs.to(dtype),
                None if entropy is None else diagnosis(state.entropy(), sampled),
                entropy_kept.to(dtype),
                None if entropy is None and not full_logprobs else diagnosis(mass, diagnosed),
                diagnosis(state.label_logprobs(), diagnosed) if full_logprobs else None,
            )

        ctx.mark_non_differentiable(*(one for one in outputs[1:] if one is not None))
        ctx.set_materialize_grads(False)
        ctx.softcap = softcap
        alone = at[free]  # [U]
        ctx.save_for_backward(
            hidden,
            weight,
            labels,
            ids,
            offsets,
            temperature,
            slopes.to(dtype),
            alone,
            *(one[free] for one in state),
        )
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
                _unmasked_gradient(
                    h, weight, labels, temperature.to(dtype), alone, full.WholeVocabulary(*state),
                    ctx.softcap, grad, grad_hidden, grad_weight, by_id,
                )  # fmt: skip
            elif grad_weight is not None and by_id is not None:
                step = sparse.chunk_of(weight.shape[1], weight.device)
                for start in range(0, by_id.ids.numel(), step):
                    stop = min(start + step, by_id.ids.numel())
                    grad_weight[by_id.ids[start:stop]] = by_id.rows(start, stop).to(weight.dtype)
            return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, *nothing


def _kept_rows(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    ids: Tensor,
    offsets: Tensor,
    positions: Tensor,
    t: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """Everything of the masked positions, in float64 once the logits are there (M numbers: cheap).

    Returns logprobs [N], entropy [N], logsumexp [N] as two terms to add, d(logprob) / d(raw logit) [M].
    Entries of unmasked positions mean nothing.
    """
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
    return logprobs, entropy, (largest, log_total), slopes if slope is None else slopes * slope


def _unmasked_gradient(
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
