"""What is refused before anything is computed. Values are looked at on the device, with one host
synchronisation.
"""

import math
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from .csr import positions_of
from .types import KeptSet

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, kept: KeptSet, temperature: Tensor) -> None:
    """Refuse shapes, types and devices that do not fit; looks at no value."""
    _check_kinds(hidden, weight, labels, kept, temperature)
    if hidden.ndim != 2:
        raise ValueError(
            f"hidden: has shape {tuple(hidden.shape)}, but must be [N, H]; flatten batch and sequence"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: has shape {tuple(weight.shape)}, but must be [V, {hidden.shape[1]}] to fit "
            f"hidden {tuple(hidden.shape)}; pass lm_head.weight as it is"
        )
    num = hidden.shape[0]
    for name, tensor, shape, types in (
        ("hidden", hidden, tuple(hidden.shape), FLOATS),
        ("weight", weight, tuple(weight.shape), FLOATS),
        ("labels", labels, (num,), (torch.int64,)),
        ("temperature", temperature, (num,), (torch.float32, torch.float64)),
        ("kept.ids", kept.ids, (kept.ids.numel(),), (torch.int32,)),
        ("kept.offsets", kept.offsets, (num + 1,), (torch.int64,)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: has shape {tuple(tensor.shape)}, but must be {shape} for N = {num} positions"
            )
        if tensor.dtype not in types:
            raise ValueError(
                f"{name}: has dtype {tensor.dtype}, but must be {' or '.join(map(str, types))}; convert it"
            )
        if tensor.device != hidden.device:
            raise ValueError(
                f"{name}: is on {tensor.device}, but hidden is on {hidden.device}; move it there"
            )


def _check_kinds(hidden: Any, weight: Any, labels: Any, kept: Any, temperature: Any) -> None:
    """Refuse what is no tensor, and kept sets in another form: says how to make what is needed of it."""
    if not isinstance(kept, KeptSet):
        way_out = "KeptSet.from_rows takes a list of ids a position"
        if kept is None:
            way_out = "KeptSet.whole_vocabulary(N) masks nothing"
        elif hasattr(kept, "ids") and hasattr(kept, "counts"):
            way_out = "pass KeptSet.from_arrays(kept.ids, kept.counts)"
        raise ValueError(f"kept: is {_kind(kept)}, but must be a KeptSet; {way_out}")
    for name, value, way_out in (
        ("hidden", hidden, "a tensor [N, H]; torch.as_tensor makes one of an array"),
        ("weight", weight, "a tensor [V, H]; pass lm_head.weight, not lm_head"),
        ("labels", labels, "an int64 tensor [N]; torch.as_tensor makes one of a list or an array"),
        ("temperature", temperature, "a float32 tensor [N]; torch.full((N,), 0.7) where all have one"),
        ("kept.ids", kept.ids, "an int32 tensor; KeptSet.from_arrays takes lists and arrays"),
        ("kept.offsets", kept.offsets, "an int64 tensor; KeptSet.from_arrays takes lists and arrays"),
    ):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: is {_kind(value)}, but must be {way_out}")


def _kind(value: Any) -> str:
    """What a value is, in an error: short ones are shown."""
    if value is None:
        return "None"
    shown = f" {value}" if isinstance(value, Real) else ""
    return f"of type {type(value).__name__}{shown}"


def check_options(softcap: float | None, entropy: Literal["full"] | float | None) -> None:
    """Refuse options outside their range."""
    if softcap is not None and not (isinstance(softcap, Real) and math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap: {softcap!r} is not a positive number; pass None for no cap")
    if entropy is None or entropy == "full":
        return
    if not isinstance(entropy, Real) or not 0 < entropy <= 1:
        raise ValueError(
            f'entropy: {entropy!r} is neither "full", nor a share of positions in (0, 1], nor None'
        )


def check_values(labels: Tensor, vocab_size: int, kept: KeptSet, temperature: Tensor) -> None:
    """Refuse values that make no sense, naming the first position.

    Offsets start at 0, never fall and end at ``len(ids)``; ids and labels are inside the vocabulary; a label
    is in its set unless that is empty (its logprob could be above 0 otherwise); temperatures are finite and
    above 0. Not looked at: an id that is twice in one set.
    """
    ids, offsets = kept
    num = labels.numel()
    positions = positions_of(offsets, ids.numel())  # safe to index with even if offsets make no sense
    found = torch.zeros(num + 1, dtype=torch.bool, device=labels.device)
    if num:
        found.scatter_(0, torch.where(ids == labels[positions], positions, num), True)
    wrong = [
        (offsets[:1] != 0) | (offsets[-1:] != ids.numel()),
        offsets[1:] < offsets[:-1],
        (ids < 0) | (ids >= vocab_size),
        (labels < 0) | (labels >= vocab_size),
        ~found[:num] & (offsets[1:] > offsets[:-1]),
        ~(torch.isfinite(temperature) & (temperature > 0)),
    ]
    verdicts = torch.stack([one.any() for one in wrong]).tolist()  # the synchronisation
    if any(verdicts):
        which = verdicts.index(True)
        entry = int(wrong[which].nonzero()[0, 0])
        raise ValueError(_explain(which, entry, labels, vocab_size, kept, positions, temperature))


def _explain(
    which: int,
    entry: int,
    labels: Tensor,
    vocab_size: int,
    kept: KeptSet,
    positions: Tensor,
    temperature: Tensor,
) -> str:
    """The text of the error; ``entry`` is the first one for which test ``which`` of check_values fails."""
    ids, offsets = kept
    if which == 0:
        return (
            f"kept.offsets: go from {int(offsets[0])} to {int(offsets[-1])}, but must go from 0 to "
            f"{ids.numel()}, the number of ids; ids and offsets must be of the same positions"
        )
    if which == 1:
        start, stop = offsets[entry : entry + 2].tolist()
        return f"kept.offsets: at position {entry}: fall from {start} to {stop}; they add up the counts"
    if which == 2:
        return (
            f"kept.ids: at position {int(positions[entry])}: {int(ids[entry])} is outside the vocabulary of "
            f"{vocab_size}; rollout and trainer must use the same model"
        )
    if which == 3:
        return (
            f"labels: at position {entry}: {int(labels[entry])} is outside the vocabulary of {vocab_size}; "
            "leave out positions that have no label"
        )
    if which == 4:
        row = ids[int(offsets[entry]) : int(offsets[entry + 1])].tolist()
        shown = ", ".join(map(str, row[:8])) + (", ..." if len(row) > 8 else "")
        return (
            f"labels: at position {entry}: {int(labels[entry])} is not in its kept set "
            f"({len(row)} ids: {shown}); "
            "hidden[n] predicts token n + 1, so it needs the label and the set of token n + 1"
        )
    return (
        f"temperature: at position {entry}: {float(temperature[entry])} is not a positive finite number; "
        "pass the temperature that the token was sampled with"
    )
