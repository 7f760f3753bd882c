"""What is true of every payload, and what a reader may ask of it; all of it on whole arrays."""

import numpy as np
from numpy.typing import NDArray

from .errors import KeptTokensError

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


def offsets_of(counts: Int32Array) -> Int64Array:
    """Where each position's ids start, int64 [T + 1], read-only; int64 because counts may sum past int32."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=offsets[1:])
    offsets.flags.writeable = False
    return offsets


def position_of(entry: int, offsets: Int64Array) -> int:
    """The token position that entry ``entry`` of the flat ids belongs to."""
    return int(np.searchsorted(offsets, entry, side="right")) - 1


def check_counts(num_ids: int, counts: Int32Array) -> None:
    """Counts are never negative and sum to the number of ids."""
    if counts.size and counts.min() < 0:
        position = int(np.flatnonzero(counts < 0)[0])
        raise KeptTokensError(
            "counts",
            f"{counts[position]} is negative; a count says how many ids were kept, 0 where there is no mask",
            position=position,
        )
    total = int(counts.sum(dtype=np.int64))
    if total != num_ids:
        raise KeptTokensError(
            "counts",
            f"sum to {total}, but there are {num_ids} ids; ids and counts must come from the same tokens "
            "(trim both or neither)",
        )


def check_ids(ids: Int32Array, offsets: Int64Array) -> None:
    """Ids are never negative and never twice in one position."""
    if ids.size and ids.min() < 0:
        entry = int(np.flatnonzero(ids < 0)[0])
        raise KeptTokensError(
            "ids",
            f"{ids[entry]} is negative; token ids are >= 0 (no padding here: counts say the widths)",
            position=position_of(entry, offsets),
        )
    duplicate = find_duplicate(ids, offsets)
    if duplicate is not None:
        position, token = duplicate
        raise KeptTokensError(
            "ids",
            f"{token} occurs twice; a kept set holds an id once (one merged from shards must be "
            "deduplicated where it is recorded)",
            position=position,
        )


def out_of_order(ids: Int32Array, offsets: Int64Array) -> NDArray[np.bool_]:
    """Which positions are not in strictly ascending order, bool [T]."""
    falls = np.zeros(ids.size, np.bool_)  # falls[m]: ids[m] is not above ids[m - 1] of the same position
    np.less_equal(ids[1:], ids[:-1], out=falls[1:])
    starts = offsets[:-1]
    falls[starts[starts < ids.size]] = False  # a new position may start lower
    if not falls.any():
        return np.zeros(len(offsets) - 1, np.bool_)
    so_far = np.zeros(ids.size + 1, np.int64)
    np.cumsum(falls, out=so_far[1:])
    return so_far[offsets[1:]] > so_far[offsets[:-1]]


def position_keys(ids: Int32Array, counts: Int32Array) -> Int64Array:
    """One int64 an id that sorts by position, then id (ids are >= 0, so 31 bits hold them)."""
    return (np.repeat(np.arange(len(counts), dtype=np.int64), counts) << 31) | ids


def find_duplicate(ids: Int32Array, offsets: Int64Array) -> tuple[int, int] | None:
    """The first (position, id) that occurs twice. Only positions out of ascending order need sorting."""
    disordered = out_of_order(ids, offsets)
    if not disordered.any():
        return None
    positions = np.flatnonzero(disordered)
    counts = np.diff(offsets).astype(np.int32)
    inside = np.repeat(disordered, counts)
    keys = position_keys(ids[inside], counts[positions])
    keys.sort()
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if not twice.size:
        return None
    key = int(keys[twice[0]])
    return int(positions[key >> 31]), key & 0x7FFFFFFF


def check_vocabulary(ids: Int32Array, offsets: Int64Array, vocab_size: int) -> None:
    """Every id is below ``vocab_size``."""
    if ids.size and ids.max() >= vocab_size:
        entry = int(np.flatnonzero(ids >= vocab_size)[0])
        raise KeptTokensError(
            "ids",
            f"{ids[entry]} is outside the vocabulary of {vocab_size}; "
            "rollout and reader must use the same model",
            position=position_of(entry, offsets),
        )


def check_masks_present(counts: Int32Array, required: NDArray[np.bool_] | bool) -> None:
    """Every required position has a mask."""
    missing = np.flatnonzero((counts == 0) & required)
    if missing.size:
        raise KeptTokensError(
            "counts",
            f"0, but this token must have a mask ({missing.size} of {len(counts)} tokens lack theirs); "
            "it was sampled under truncation, so the server must record what it kept "
            "(keptset's inference, or a server that returns sampling masks)",
            position=int(missing[0]),
        )


def check_sampled(ids: Int32Array, offsets: Int64Array, sampled_ids: NDArray[np.integer]) -> None:
    """Where there is a mask, the sampled id is one of its ids."""
    counts = np.diff(offsets)
    hits = np.flatnonzero(ids == np.repeat(sampled_ids, counts))
    found = counts == 0
    found[np.searchsorted(offsets, hits, side="right") - 1] = True
    if not found.all():
        position = int(np.flatnonzero(~found)[0])
        kept = ids[offsets[position] : offsets[position + 1]]
        shown = ", ".join(map(str, kept[:8].tolist())) + (", ..." if len(kept) > 8 else "")
        raise KeptTokensError(
            "sampled_ids",
            f"the sampled id {sampled_ids[position]} is not in the kept set recorded for it "
            f"({len(kept)} ids: {shown}); tokens and masks are misaligned, or this is another set",
            position=position,
        )
