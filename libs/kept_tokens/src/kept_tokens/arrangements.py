"""Cutting, padding, joining and splitting whole training samples: every array and the kept sets together.

Nothing here judges: a cut that starts behind a loss token's context is refused by ``check_sample``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .layout import TrainingSample
from .payload import KeptTokens


def cut_sample(sample: TrainingSample, start: int, stop: int) -> TrainingSample:
    """The tokens ``start <= t < stop`` with all that belongs to them; spans of versions are cut as well.

    Raises:
        ValueError: not inside the sample, or empty.
    """
    if not 0 <= start < stop <= sample.num_tokens:
        raise ValueError(
            f"{start}:{stop} is empty or not inside the {sample.num_tokens} tokens that there are"
        )
    kept = sample.kept()
    return _like(
        sample,
        {name: array[start:stop] for name, array in _arrays(sample).items()},
        None if kept is None else kept.slice(start, stop),
        [
            (version, max(first, start) - start, min(last, stop) - start)
            for version, first, last in sample.weight_versions
            if max(first, start) < min(last, stop)
        ],
    )


def pad_sample(sample: TrainingSample, tokens: int, token_id: int = 0) -> TrainingSample:
    """``tokens`` more at the end: no loss, no masks, temperature 1.

    Raises:
        ValueError: a negative number of tokens.
    """
    if tokens < 0:
        raise ValueError(f"cannot pad by {tokens} tokens; cut_sample shortens")
    fill = {"token_ids": token_id, "temperatures": 1}
    kept = sample.kept()
    return _like(
        sample,
        {
            name: np.concatenate([array, np.full(tokens, fill.get(name, 0), array.dtype)])
            for name, array in _arrays(sample).items()
        },
        None if kept is None else kept.pad_tokens(right=tokens),
        list(sample.weight_versions),
    )


def join_samples(samples: Sequence[TrainingSample]) -> TrainingSample:
    """One after the other, as a packed row has them; names and objective are the first one's.

    Raises:
        ValueError: none, or samples whose masks, objective or reference cannot be said of all at once.
    """
    if not samples:
        raise ValueError("there is nothing to join")
    for what in ("must_have_masks", "objective", "reference_weight"):
        found = {getattr(sample, what) for sample in samples}
        if len(found) > 1:
            raise ValueError(f"samples with {what} {sorted(found)} cannot become one")
    parts = [_arrays(sample) for sample in samples]
    names = list(parts[0])
    if any(list(part) != names for part in parts):
        raise ValueError("samples with and without reference_logprobs cannot become one")
    lengths = [sample.num_tokens for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    kept = [sample.kept() for sample in samples]
    without = [KeptTokens((), np.zeros(length, np.int32)) for length in lengths]
    return _like(
        samples[0],
        {name: np.concatenate([part[name] for part in parts]) for name in names},
        None
        if all(one is None for one in kept)
        else KeptTokens.concat(one or none for one, none in zip(kept, without, strict=True)),
        [
            (version, start + first, start + last)
            for sample, start in zip(samples, starts, strict=True)
            for version, first, last in sample.weight_versions
        ],
    )


def split_sample(sample: TrainingSample, lengths: Sequence[int]) -> list[TrainingSample]:
    """The inverse of :func:`join_samples`: parts of these lengths, in order.

    Raises:
        ValueError: lengths that do not add up to the sample's.
    """
    if sum(lengths) != sample.num_tokens:
        raise ValueError(f"lengths sum to {sum(lengths)}, but the sample has {sample.num_tokens} tokens")
    ends = np.cumsum(lengths).tolist()
    return [cut_sample(sample, end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _arrays(sample: TrainingSample) -> dict[str, NDArray[np.generic]]:
    """All that has an entry a token, but for the kept sets."""
    arrays: dict[str, NDArray[np.generic]] = dict(sample.arrays()._asdict())
    reference = sample.reference()
    return arrays if reference is None else {**arrays, "reference_logprobs": reference}


def _like(
    sample: TrainingSample,
    arrays: dict[str, NDArray[np.generic]],
    kept: KeptTokens | None,
    weight_versions: list[tuple[int, int, int]],
) -> TrainingSample:
    converted: dict[str, ArrayLike] = dict(arrays)
    return TrainingSample.build(
        **converted,
        kept=kept,
        must_have_masks=sample.must_have_masks,
        source=sample.source,
        group=sample.group,
        sample_id=sample.sample_id,
        weight_versions=weight_versions,
        objective=sample.objective,
        reference_weight=sample.reference_weight,
    )
