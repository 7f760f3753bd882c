"""The public function: validates, then hands over to a backend."""

from importlib.util import find_spec
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from . import torch_backend
from .types import KeptLogprobs, KeptSet
from .validation import check_options, check_shapes, check_values


def kept_logprobs(
    hidden: Float[Tensor, "positions hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int64[Tensor, " positions"],
    kept: KeptSet,
    temperature: Float[Tensor, " positions"],
    *,
    softcap: float | None = None,
    entropy: Literal["full"] | float | None = "full",
    full_logprobs: bool = False,
    num_unmasked: int | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> KeptLogprobs:
    """Logprobs of the labels, renormalised over the set that truncated sampling kept.

    For position n with kept set K, label y and temperature T: ``z = W h``, soft-capped if asked, and
    ``logprob = z[y] / T - logsumexp(z[K] / T)``. z is computed for the kept ids alone, so cost follows their
    number; the whole vocabulary is needed only at positions with an empty K (which means all of it) and for
    diagnostics.

    Gradients flow to ``hidden`` and, if it requires them, to ``weight`` (dense, its dtype); a weight tied to
    the embedding just works. A singleton gives exactly 0 and exactly zero gradient. Sums are float32 whatever
    the inputs (float64 if an input is float64, and then so are the results) and deterministic. NaN in
    ``hidden`` gives NaN, except that Triton does not read ``hidden`` for a singleton, which stays 0.

    Args:
        hidden: [N, H]; bfloat16, float16, float32 or float64.
        weight: [V, H], the output head; any of these types.
        labels: int64 [N], the sampled ids. For ``hidden[n]`` of a sequence that is token n + 1, and so is its
            set.
        kept: the kept sets of the labels; ids distinct inside a set.
        temperature: float32 [N], that each label was sampled with.
        softcap: c of ``c * tanh(z / c)``, as Gemma 2 has it.
        entropy: ``"full"`` = the whole-vocabulary entropy at every position; a share in (0, 1] = at that
            share of positions, evenly spaced, NaN elsewhere; None = not at all.
        full_logprobs: also the label's logprob over the whole vocabulary, at every position.
        num_unmasked: how many positions have an empty set, from a caller who has checked all values already
            (as :func:`kept_loss.validation.check_values` does, on the host, say). With Triton the host then
            does not wait for the device, unless the whole vocabulary is for some positions only: some sets
            are empty and others not, or a share of the entropy. None: checked and counted here.
        backend: ``"torch"`` (any device, any type) or ``"triton"`` (CUDA; hidden and weight of one type,
            bfloat16, float16 or float32); ``"auto"`` takes Triton where it can.

    Returns:
        KeptLogprobs; everything beside ``logprobs`` has no gradient.

    Raises:
        ValueError: shapes, types or devices that do not fit; offsets that fall or do not end at the number of
            ids; an id or label outside the vocabulary; a label that is not in its set; a temperature that is
            not positive and finite. Values are checked on the device; reading the verdict synchronises with
            the host. With ``num_unmasked`` only shapes and types are checked, and wrong values give wrong
            results.
        ImportError: the Triton backend without Triton.
    """
    check_shapes(hidden, weight, labels, kept, temperature)
    check_options(softcap, entropy)
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f'backend: {backend!r} is none of "auto", "torch", "triton"')
    if backend == "triton" or (backend == "auto" and _triton_serves(hidden, weight)):
        from . import triton_backend  # not at the top: Triton need not be installed

        # verifies values itself, on the way
        return triton_backend.kept_logprobs(
            hidden, weight, labels, kept, temperature,
            softcap=softcap, entropy=entropy, full_logprobs=full_logprobs, num_unmasked=num_unmasked,
        )  # fmt: skip
    if num_unmasked is None:
        with torch.no_grad():
            check_values(labels, weight.shape[0], kept, temperature)
    return torch_backend.kept_logprobs(
        hidden,
        weight,
        labels,
        kept,
        temperature,
        softcap=softcap,
        entropy=entropy,
        full_logprobs=full_logprobs,
    )


def _triton_serves(hidden: Tensor, weight: Tensor) -> bool:
    """Whether ``auto`` takes Triton: on CUDA, where it is installed, for types that it knows."""
    known = hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return hidden.is_cuda and known and find_spec("triton") is not None
