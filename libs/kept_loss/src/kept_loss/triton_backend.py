"""The Triton backend, for CUDA: masked positions gather their kept rows of W, M = sum(counts) of them."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .entropy_sample import sampled_positions
from .kernels import INTERPRETED
from .kernels.rows import entry_logits, row_logprobs, row_slopes
from .kernels.segments import segment_sum
from .kernels.verdict import Verdict, positions_and_verdict
from .kernels.vocabulary import logit_gradient, vocabulary_sums
from .types import KeptLogprobs, KeptSet
from .validation import check_values

POSITION_BLOCK, VOCABULARY_BLOCK = 4096, 4096
"""Tile of the whole-vocabulary backward: 64 MiB of float32 logits."""


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
    num_unmasked: int | None = None,
) -> KeptLogprobs:
    """As :func:`kept_loss.kept_logprobs`, which has verified shapes and types; values are verified here.

    A singleton reads neither ``hidden`` nor W: exactly 0 with exactly zero gradient even where ``hidden`` is
    NaN, for which the torch backend gives NaN. Every other position that sees a NaN gives NaN.

    Raises:
        ValueError: types that the kernels do not know, a device that is not CUDA (unless Triton's interpreter
            runs the kernels), or values that :func:`kept_loss.validation.check_values` refuses.
    """
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"backend: Triton needs hidden and weight both bfloat16, float16 or float32, got {hidden.dtype} "
            f'and {weight.dtype}; convert one, or use backend="torch"'
        )
    if not hidden.is_cuda and not INTERPRETED:
        raise ValueError(
            f'backend: Triton needs CUDA, hidden is on {hidden.device}; use backend="torch" or "auto"'
        )
    # The kernels know no strides, and launch on the current device.
    with torch.cuda.device(hidden.get_device()):
        outputs = _KeptLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.contiguous(), weight.contiguous(), labels.contiguous(), kept.ids.contiguous(),
            kept.offsets.contiguous(), temperature.float().contiguous(), softcap, entropy, full_logprobs,
            num_unmasked,
        )  # fmt: skip
    return KeptLogprobs(*outputs)


class _KeptLogprobs(torch.autograd.Function):
    """Saves hidden, weight, one number for each kept id, a few for each position: nothing of N x V."""

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
        num_unmasked: int | None,
    ) -> tuple[Tensor | None, ...]:
        num, device = hidden.shape[0], hidden.device
        if num == 0:  # no program runs that could refuse ids that belong to no position
            check_values(labels, weight.shape[0], KeptSet(ids, offsets), temperature)
        positions, verdict = positions_and_verdict(ids, offsets, labels, temperature, weight.shape[0])
        logits = entry_logits(hidden, weight, ids, positions, offsets, softcap)
        logprobs, entropy_kept, peak, log_total, rest = row_logprobs(
            logits, ids, offsets, labels, temperature
        )
        by_id = order = ids.new_empty(0)
        if ctx.needs_input_grad[1]:  # sorted here, where the device would else wait for the host
            by_id, order = torch.sort(ids, stable=True)
        if num_unmasked is None:
            told = Verdict(*verdict.tolist())  # the one synchronisation with the host
            if any(told[:-1]):
                check_values(
                    labels, weight.shape[0], KeptSet(ids, offsets), temperature
                )  # says what is wrong
                raise AssertionError(f"the kernels refuse what check_values lets pass: {told}")
            num_unmasked = told.unmasked

        alone = labels.new_empty(0)
        logsumexp = logprobs.new_empty(0)
        entropy_all = mass = label_all = None
        if num_unmasked or entropy is not None or full_logprobs:
            unmasked = offsets[1:] == offsets[:-1]
            sampled = sampled_positions(num, entropy, device)
            diagnosed = torch.ones_like(sampled) if full_logprobs else sampled
            everywhere = full_logprobs or entropy == "full" or num_unmasked == num
            if everywhere:  # known without asking the device
                at = torch.arange(num, device=device)
            else:
                at = (unmasked | diagnosed).nonzero().squeeze(1)  # [P]
            h, label, heat = (
                (hidden, labels, temperature) if everywhere else (hidden[at], labels[at], temperature[at])
            )
            targets = label if num_unmasked else None
            sums = vocabulary_sums(h, weight, heat, softcap, _processors(device), targets)
            own = torch.arange(at.numel(), dtype=torch.int32, device=device)
            label_logit = entry_logits(h, weight, label.to(torch.int32), own, None, softcap) / heat
            label_logprob = ((label_logit - sums.peak) - sums.total.log()).clamp(max=0)
            if num_unmasked:
                free = unmasked[at]
                logprobs[at] = torch.where(free, label_logprob, logprobs[at])
                entropy_kept[at] = torch.where(free, sums.entropy(), entropy_kept[at])
                rest[at] = torch.where(free, sums.label_rest(), rest[at])
                alone, logsumexp = at, sums.logsumexp()  # [U]
                if num_unmasked < num:  # else known without asking the device
                    alone, logsumexp = alone[free], logsumexp[free]

            def diagnosis(values: Tensor, where: Tensor) -> Tensor:
                scattered = values.new_full((num,), torch.nan).index_copy_(0, at, values)
                return scattered.masked_fill_(~where, torch.nan)

            if entropy is not None:
                entropy_all = diagnosis(sums.entropy(), sampled)
            if entropy is not None or full_logprobs:
                ratio = ((peak[at] - sums.peak) + (log_total[at] - sums.total.log())).exp()
                width = (offsets[1:] - offsets[:-1])[at]
                # no logit was computed for singletons; a whole set's sum may round past the vocabulary's
                ratio = torch.where(width == 1, label_logprob.exp(), ratio)
                mass = diagnosis(torch.where(width == 0, 1, ratio.clamp(max=1)), diagnosed)
            if full_logprobs:
                label_all = diagnosis(label_logprob, diagnosed)
        outputs = (logprobs, entropy_all, entropy_kept, mass, label_all)
        ctx.mark_non_differentiable(*(one for one in outputs[1:] if one is not None))
        ctx.set_materialize_grads(False)
        ctx.softcap = softcap
        ctx.save_for_backward(
            hidden, weight, labels, ids, offsets, positions, temperature, logits, peak, log_total, rest,
            alone, logsumexp, by_id, order,
        )  # fmt: skip
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 8
        if grads[0] is None:
            return None, None, *nothing
        (
            hidden, weight, labels, ids, offsets, positions, temperature, logits, peak, log_total, rest,
            alone, logsumexp, by_id, order,
        ) = ctx.saved_tensors  # fmt: skip
        grad = grads[0].float().contiguous()
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)  # first: meanwhile the host launches the rest
        slopes = row_slopes(
            logits, ids, positions, offsets, labels, temperature, peak, log_total, rest, grad, ctx.softcap
        )
        if ctx.needs_input_grad[0]:
            grad_hidden = segment_sum(weight, ids, slopes, positions, torch.zeros_like(hidden))
        if grad_weight is not None:
            segment_sum(hidden, positions, slopes, by_id, grad_weight, order)
        if alone.numel():
            with torch.autocast(hidden.device.type, enabled=False):
                _add_unmasked(
                    hidden, weight, labels[alone], temperature[alone], logsumexp, rest[alone], grad[alone],
                    alone, ctx.softcap, grad_hidden, grad_weight,
                )  # fmt: skip
        return grad_hidden, grad_weight, *nothing


def _add_unmasked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    logsumexp: Tensor,
    rest: Tensor,
    grad: Tensor,
    alone: Tensor,
    softcap: float | None,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Add the gradients of the positions ``alone`` [U], tile by tile; logits are computed again.

    Sums are float32; of the logits' gradient a bfloat16 head keeps the 8 bits that tensor cores take. float16
    has not the range for that gradient, so it stays float32.
    """
    kind = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    total_hidden = torch.zeros(alone.numel(), hidden.shape[1], dtype=torch.float32, device=hidden.device)
    for first in range(0, weight.shape[0], VOCABULARY_BLOCK):
        rows = weight[first : first + VOCABULARY_BLOCK]
        total_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for start in range(0, alone.numel(), POSITION_BLOCK):
            part = slice(start, start + POSITION_BLOCK)
            h = hidden[alone[part]]
            logits = _matmul(h, rows.T)
            d = logit_gradient(
                logits, labels[part], temperature[part], logsumexp[part], rest[part], grad[part],
                first, softcap, kind,
            )  # fmt: skip
            if grad_hidden is not None:
                total_hidden[part] += _matmul(d, rows)
            if grad_weight is not None:
                total_rows += _matmul(d.T, h)
        if grad_weight is not None:
            block = grad_weight[first : first + VOCABULARY_BLOCK]
            block.copy_(total_rows.add_(block))
    if grad_hidden is not None:
        grad_hidden[alone] = total_hidden.to(hidden.dtype)  # an unmasked position has no other gradient


def _processors(device: torch.device) -> int:
    """How many programs run at once."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """A float32 product, whatever the inputs: a logit in bfloat16 would be off by more than ratios differ."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
