"""Kept-set logprobs over a W whose rows lie on several ranks: each scores its own ids, sums are reduced."""

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kept_logits as sparse
from . import vocabulary as full
from .csr import positions_of, row_max, row_sum
from .entropy_sample import sampled_positions
from .softcap import capped
from .torch_backend import unmasked_gradient
from .types import KeptLogprobs, KeptSet
from .validation import check_options, check_shapes, check_values


def parallel_kept_logprobs(
    hidden: Float[Tensor, "positions hidden"],
    weight: Float[Tensor, "shard hidden"],
    labels: Int64[Tensor, " positions"],
    kept: KeptSet,
    temperature: Float[Tensor, " positions"],
    group: dist.ProcessGroup,
    *,
    softcap: float | None = None,
    entropy: Literal["full"] | float | None = "full",
    full_logprobs: bool = False,
) -> KeptLogprobs:
    """What :func:`kept_loss.kept_logprobs` gives, on every rank, without any rank having all of W.

    Every rank calls this, and later backward, with the same arguments but for ``weight``. The gradient of
    ``hidden`` is the whole one on every rank; that of ``weight`` is that of the rank's rows.

    Args:
        hidden: [N, H], the same on every rank.
        weight: [V_r, H], this rank's rows of W, any number; those of the ranks follow each other.
        labels: int64 [N].
        kept: the kept sets; ids are those of the whole vocabulary.
        temperature: float32 [N].
        group: the ranks.
        softcap: as in ``kept_logprobs``.
        entropy: as in ``kept_logprobs``.
        full_logprobs: as in ``kept_logprobs``.

    Raises:
        ValueError: as ``kept_logprobs``.
    """
    check_shapes(hidden, weight, labels, kept, temperature)
    check_options(softcap, entropy)
    first, vocab_size = _place(weight, group)
    with torch.no_grad():
        check_values(labels, vocab_size, kept, temperature)
    outputs = _Parallel.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        labels,
        kept.ids,
        kept.offsets,
        temperature,
        first,
        group,
        softcap,
        entropy,
        full_logprobs,
    )
    return KeptLogprobs(*outputs)


def _place(weight: Tensor, group: dist.ProcessGroup) -> tuple[int, int]:
    """First id of this rank's rows, and the size of the vocabulary."""
    sizes: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(sizes, weight.shape[0], group=group)
    return sum(sizes[: dist.get_rank(group)]), sum(sizes)


class _Own(NamedTuple):
    """The entries of the kept sets that lie on this rank, CSR over the same N positions."""

    ids: Tensor
    """int32 [m], of rows of this rank's W."""
    offsets: Tensor
    """int64 [N + 1]."""
    positions: Tensor
    """int64 [m]."""
    is_label: Tensor
    """bool [m]."""


def _own_entries(labels: Tensor, ids: Tensor, offsets: Tensor, first: int, rows: int) -> _Own:
    positions = positions_of(offsets, ids.numel())
    mine = ((ids >= first) & (ids < first + rows)).nonzero().squeeze(1)
    own = positions[mine]
    counts = torch.zeros_like(offsets[1:]).index_add_(0, own, torch.ones_like(own))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return _Own(ids[mine] - first, starts, own, ids[mine] == labels[own])


def _summed(values: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each of some float64 [P] added up over the ranks."""
    together = torch.stack(values)
    dist.all_reduce(together, group=group)
    return list(together.unbind())


def _largest(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def _whole_vocabulary(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    first: int,
    group: dist.ProcessGroup,
    softcap: float | None,
) -> full.WholeVocabulary:
    """Softmax statistics over all ranks' rows."""
    here = full.whole_vocabulary(hidden, weight, labels - first, temperature, softcap)
    largest = _largest(here.largest, group)
    shift = torch.where(here.total > 0, here.largest - largest, 0)  # a rank may have no rows
    scale = shift.exp()
    total, moment, label = _summed(
        [here.total * scale, (here.moment + here.total * shift) * scale, here.label], group
    )
    return full.WholeVocabulary(largest, total, moment, label)


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ids: Tensor,
        offsets: Tensor,
        temperature: Tensor,
        first: int,
        group: dist.ProcessGroup,
        softcap: float | None,
        entropy: Literal["full"] | float | None,
        full_logprobs: bool,
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
            num = hidden.shape[0]
            h, t = hidden.to(dtype), temperature.to(dtype)
            own = _own_entries(labels, ids, offsets, first, weight.shape[0])
            raw = sparse.kept_logits(h, weight, own.ids, own.positions, dtype)
            logits, slope = capped(raw.double(), softcap)
            scale = t.double()[own.positions]
            scaled = logits / scale
            largest = _largest(row_max(scaled, own.positions, num), group)
            below = scaled - largest[own.positions]
            weights = below.exp()
            # One of the largest entries stays out of the sum: its weight is exactly 1 (see torch_backend).
            is_peak = below == 0

            def of_rows(values: Tensor) -> Tensor:
                return row_sum(values.double(), own.offsets)

            peaks, others, label_below, moment, rest = _summed(
                [
                    of_rows(is_peak),
                    of_rows(weights.masked_fill(is_peak, 0)),
                    of_rows(below.masked_fill(~own.is_label, 0)),
                    of_rows(weights * below),
                    of_rows(weights.masked_fill(own.is_label, 0)),
                ],
                group,
            )
            others += (peaks - 1).clamp(min=0)
            log_total = others.log1p()
            logprobs = label_below - log_total
            entropy_kept = log_total - moment / (1 + others)
            probabilities = weights / (1 + others)[own.positions]
            label_rest = (rest / (1 + others))[own.positions]
            slopes = torch.where(own.is_label, label_rest, -probabilities) / scale
            slopes = (slopes if slope is None else slopes * slope).to(dtype)

            unmasked = offsets[1:] == offsets[:-1]
            alone = unmasked.nonzero().squeeze(1)  # [U]
            sampled = sampled_positions(num, entropy, hidden.device)
            looked_at = torch.ones_like(sampled) if full_logprobs else sampled
            diagnosed = (looked_at & ~unmasked).nonzero().squeeze(1)

            def over_all(at: Tensor) -> full.WholeVocabulary:
                return _whole_vocabulary(h[at], weight, labels[at], t[at], first, group, softcap)

            state, seen = over_all(alone), over_all(diagnosed)
            logprobs = logprobs.index_copy(0, alone, state.label_logprobs())
            entropy_kept = entropy_kept.index_copy(0, alone, state.entropy())
            mass = (largest[diagnosed] - seen.largest) + (log_total[diagnosed] - seen.total.log())
            nowhere = logprobs.new_full((num,), torch.nan)
            entropy_all = nowhere.index_copy(0, alone, state.entropy()).index_copy(
                0, diagnosed, seen.entropy()
            )
            mass_all = nowhere.index_fill(0, alone, 1).index_copy(0, diagnosed, mass.exp().clamp(max=1))
            label_all = logprobs.index_copy(0, diagnosed, seen.label_logprobs())

            def where(chosen: Tensor, values: Tensor) -> Tensor:
                return values.masked_fill(~chosen, torch.nan).to(dtype)

            outputs = (
                logprobs.to(dtype),
                None if entropy is None else where(sampled, entropy_all),
                entropy_kept.to(dtype),
                None if entropy is None and not full_logprobs else where(looked_at, mass_all),
                label_all.to(dtype) if full_logprobs else None,
            )
        ctx.mark_non_differentiable(*(one for one in outputs[1:] if one is not None))
        ctx.set_materialize_grads(False)
        ctx.softcap, ctx.group, ctx.first = softcap, group, first
        ctx.save_for_backward(
            hidden, weight, labels, temperature, slopes, own.ids, own.offsets, own.positions, alone, *state
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 9
        if grads[0] is None:
            return None, None, *nothing
        hidden, weight, labels, temperature, slopes, ids, offsets, positions, alone, *state = (
            ctx.saved_tensors
        )
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = slopes.dtype
            h, grad = hidden.to(dtype), grads[0].to(dtype)
            grad_logits = slopes * grad[positions]
            grad_hidden = torch.zeros_like(h)  # of every rank, also if only another one's weight needs one
            sparse.add_hidden_gradient(grad_hidden, weight, ids, offsets, positions, grad_logits)
            grad_weight = torch.zeros_like(weight)
            by_id = sparse.WeightGradient(h, ids, positions, grad_logits)
            if alone.numel():
                unmasked_gradient(
                    h, weight, labels - ctx.first, temperature.to(dtype), alone, full.WholeVocabulary(*state),
                    ctx.softcap, grad, grad_hidden, grad_weight, by_id,
                )  # fmt: skip
            else:
                step = sparse.chunk_of(weight.shape[1], weight.device)
                for start in range(0, by_id.ids.numel(), step):
                    stop = min(start + step, by_id.ids.numel())
                    grad_weight[by_id.ids[start:stop]] = by_id.rows(start, stop).to(weight.dtype)
            dist.all_reduce(grad_hidden, group=ctx.group)
            return grad_hidden.to(hidden.dtype), grad_weight, *nothing
