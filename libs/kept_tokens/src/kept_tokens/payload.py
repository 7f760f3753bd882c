"""``KeptTokens``: which token ids survived truncation, for every token. CSR without the offsets."""

import binascii
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import invariants
from .arrays import from_buffer, int32_array, int_array, read_only, to_buffer
from .errors import KeptTokensError

_INT32 = np.dtype(np.int32)


class KeptTokens:
    """The kept sets of T tokens; immutable.

    ``ids`` holds all kept ids in position order, ``counts[t]`` how many of them belong to the token at t; 0
    means no mask at that token. Construction verifies what is always true: 1-D, counts >= 0, ``sum(counts)
    == len(ids)`` (in int64), ids >= 0, no id twice in one position. :meth:`check` verifies what depends on
    the reader. The order inside a position stays as it came (:meth:`sorted` makes it ascending) and matters
    to ``==``.

    Args:
        ids: integers, [sum(counts)]. Other types than int32 are taken if every value fits.
        counts: integers, [T].
        copy: True copies, so that nobody can write to what this object holds. False looks at int32 memory
            as it is; the caller then promises not to write to it any more.

    Raises:
        KeptTokensError: the text names field, position, value and way out.
    """

    __slots__ = ("_offsets", "counts", "ids")

    ids: NDArray[np.int32]
    """int32 [sum(counts)], read-only."""
    counts: NDArray[np.int32]
    """int32 [T], read-only."""
    _offsets: NDArray[np.int64]

    def __init__(self, ids: ArrayLike, counts: ArrayLike, *, copy: bool = True) -> None:
        """Take and verify the two arrays."""
        checked_ids = int32_array(ids, "ids", copy=copy)
        checked_counts = int32_array(counts, "counts", copy=copy)
        invariants.check_counts(len(checked_ids), checked_counts)
        offsets = invariants.offsets_of(checked_counts)
        invariants.check_ids(checked_ids, offsets)
        self._set(checked_ids, checked_counts, offsets)

    def _set(self, ids: NDArray[np.int32], counts: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        object.__setattr__(self, "ids", read_only(ids))
        object.__setattr__(self, "counts", read_only(counts))
        object.__setattr__(self, "_offsets", offsets)

    @classmethod
    def _verified(
        cls, ids: NDArray[np.int32], counts: NDArray[np.int32], offsets: NDArray[np.int64] | None = None
    ) -> Self:
        """Skip verification: for parts and arrangements of what has been verified."""
        self = cls.__new__(cls)
        self._set(ids, counts, invariants.offsets_of(counts) if offsets is None else offsets)
        return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse: a payload never changes."""
        raise AttributeError(f"KeptTokens is immutable: cannot set {name}; build a new one")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse: a payload never changes."""
        raise AttributeError(f"KeptTokens is immutable: cannot delete {name}")

    # What it holds

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens; the same as ``len()``."""
        return len(self.counts)

    def __len__(self) -> int:
        """T, the number of tokens."""
        return len(self.counts)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64 [T + 1], read-only: the ids of token t are ``ids[offsets[t]:offsets[t + 1]]``."""
        return self._offsets

    def rows(self) -> list[list[int]]:
        """One list of ids a token; an empty one where there is no mask."""
        flat = self.ids.tolist()
        ends = self.offsets.tolist()
        return [flat[start:end] for start, end in pairwise(ends)]

    def __eq__(self, other: object) -> bool:
        """Same ids in the same order for the same tokens."""
        if not isinstance(other, KeptTokens):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        """Equal payloads hash alike."""
        return hash((self.ids.tobytes(), self.counts.tobytes()))

    def __repr__(self) -> str:
        """Sizes, and the rows where there are few."""
        if len(self) <= 8 and self.ids.size <= 32:
            return f"KeptTokens.from_rows({self.rows()})"
        masked = int(np.count_nonzero(self.counts))
        return f"<KeptTokens: {len(self)} tokens, {masked} with a mask, {self.ids.size} ids>"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the two arrays; unpickling verifies them."""
        return KeptTokens, (self.ids, self.counts)

    # From and to other forms

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | NDArray[Any]], *, field: str = "ids") -> Self:
        """One sequence of ids a token, empty where there is no mask.

        Args:
            rows: lists, tuples or 1-D integer arrays.
            field: what errors call the rows.
        """
        rows = list(rows)
        for position, row in enumerate(rows):
            if not isinstance(row, list | tuple | np.ndarray):
                raise KeptTokensError(
                    field,
                    f"is {type(row).__name__}, but must be a list of ids (empty where there is no mask)",
                    position=position,
                )
        counts = np.fromiter((len(row) for row in rows), np.int32, len(rows))
        if rows and all(isinstance(row, np.ndarray) for row in rows):
            return cls(np.concatenate([int_array(row, field) for row in rows]), counts)
        flat = list(chain.from_iterable(rows))
        wrong = {
            kind for kind in set(map(type, flat)) if kind is bool or not issubclass(kind, int | np.integer)
        }
        if wrong:
            entry = next(i for i, value in enumerate(flat) if type(value) in wrong)
            position = invariants.position_of(entry, invariants.offsets_of(counts))
            raise KeptTokensError(
                field, f"{flat[entry]!r} is no integer; a row holds token ids", position=position
            )
        return cls(flat, counts)

    @classmethod
    def from_bytes(cls, ids: bytes, counts: bytes) -> Self:
        """The MessagePack form: both arrays as int32, little-endian. ``bytes`` are looked at, not copied."""
        return cls(from_buffer(ids, _INT32, "ids"), from_buffer(counts, _INT32, "counts"), copy=False)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """``(ids, counts)`` as int32, little-endian."""
        return to_buffer(self.ids), to_buffer(self.counts)

    @classmethod
    def from_base64(cls, payload: Mapping[str, Any]) -> Self:
        """The JSON dialect ``kept_tokens``: ``{"ids": "<base64>", "counts": "<base64>"}``.

        Base64 is read strictly: no white space, no missing padding. Other keys are not looked at.
        """
        if not isinstance(payload, Mapping):
            raise KeptTokensError(
                "kept_tokens",
                f'is {type(payload).__name__}, but must be {{"ids": base64, "counts": base64}}; '
                "null means that the request got no masks and is not a payload",
            )
        return cls.from_bytes(_unbase64(payload, "ids"), _unbase64(payload, "counts"))

    def to_base64(self) -> dict[str, str]:
        """``{"ids": ..., "counts": ...}``, ``ids`` first, as clients that search the raw body need it."""
        ids, counts = self.to_bytes()
        return {
            "ids": binascii.b2a_base64(ids, newline=False).decode("ascii"),
            "counts": binascii.b2a_base64(counts, newline=False).decode("ascii"),
        }

    @classmethod
    def from_sampling_mask(cls, mask: Sequence[Sequence[int]]) -> Self:
        """The JSON dialect ``sampling_mask`` of stock vLLM: a list of ids a token."""
        if not isinstance(mask, list | tuple):
            raise KeptTokensError(
                "sampling_mask", f"is {type(mask).__name__}, but must be a list of lists of ids"
            )
        return cls.from_rows(mask, field="sampling_mask")

    def to_sampling_mask(self) -> list[list[int]]:
        """``[[3, 17], [5]]``; an empty list where there is no mask."""
        return self.rows()

    def to_padded(self, width: int | None = None, fill: int = -1) -> NDArray[np.int32]:
        """int32 [T, width] for trainers that want a rectangle; ``fill`` stands right of each position's ids.

        Args:
            width: columns; None takes the largest count. Smaller than that is an error: nothing is cut.
            fill: must be negative, so that it cannot be taken for an id.
        """
        if fill >= 0:
            raise KeptTokensError("fill", f"{fill} could be a token id; take a negative number")
        largest = int(self.counts.max()) if len(self) else 0
        if width is None:
            width = largest
        elif width < largest:
            raise KeptTokensError(
                "counts",
                f"{largest} ids do not fit the asked width of {width}; ask for width={largest} or more",
                position=int(self.counts.argmax()),
            )
        padded = np.full((len(self), width), fill, np.int32)
        padded[np.arange(width) < self.counts[:, None]] = self.ids
        return padded

    # Other arrangements

    def sorted(self) -> Self:
        """The canonical form: ascending ids inside each position. The same object if it is that already."""
        if not invariants.out_of_order(self.ids, self.offsets).any():
            return self
        keys = invariants.position_keys(self.ids, self.counts)
        keys.sort()
        return self._verified((keys & 0x7FFFFFFF).astype(np.int32), self.counts, self.offsets)

    def slice(self, start: int, stop: int | None = None) -> Self:
        """The tokens ``start <= t < stop`` (None: to the end); a view. Outside 0..T is an error."""
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise KeptTokensError(
                "slice", f"{start}:{stop} is not inside 0:{len(self)}; slice tokens that there are"
            )
        first, last = self.offsets[start], self.offsets[stop]
        offsets = self.offsets[start : stop + 1] - first
        offsets.flags.writeable = False
        return self._verified(self.ids[first:last], self.counts[start:stop], offsets)

    @classmethod
    def concat(cls, parts: Iterable["KeptTokens"]) -> Self:
        """All tokens of all parts, one after the other; nothing for no parts."""
        parts = list(parts)
        if not parts:
            return cls((), ())
        return cls._verified(
            np.concatenate([part.ids for part in parts]), np.concatenate([part.counts for part in parts])
        )

    def pad_tokens(self, left: int = 0, right: int = 0) -> Self:
        """Tokens without a mask (count 0) in front and behind: a prompt, a tool's answer, padding."""
        if left < 0 or right < 0:
            raise KeptTokensError(
                "pad_tokens", f"left={left}, right={right}: neither may be negative; use slice"
            )
        counts = np.zeros(left + len(self) + right, np.int32)
        counts[left : left + len(self)] = self.counts
        return self._verified(self.ids, counts)

    # What depends on the reader

    def check(
        self,
        num_tokens: int | None = None,
        vocab_size: int | None = None,
        sampled_ids: ArrayLike | None = None,
        require_masks: bool | ArrayLike = False,
    ) -> Self:
        """Verify what the reader knows; returns self, so that it can be chained.

        Args:
            num_tokens: how many tokens there must be.
            vocab_size: every id must be smaller.
            sampled_ids: integers [T], the token at each position. It must be in its set wherever there is
                one; positions without a mask are not looked at.
            require_masks: True, or bool [T] for some tokens only: these must have a mask.

        Raises:
            KeptTokensError: the text names field, position, value and way out.
        """
        if num_tokens is not None and num_tokens != len(self):
            raise KeptTokensError(
                "counts",
                f"has {len(self)} entries, but there are {num_tokens} tokens; there is one count a token "
                "(0 where there is no mask)",
            )
        if vocab_size is not None:
            invariants.check_vocabulary(self.ids, self.offsets, vocab_size)
        if require_masks is True:
            invariants.check_masks_present(self.counts, True)
        elif require_masks is not False:
            invariants.check_masks_present(self.counts, self._per_token(require_masks, "require_masks", "b"))
        if sampled_ids is not None:
            sampled = self._per_token(sampled_ids, "sampled_ids", "iu")
            invariants.check_sampled(self.ids, self.offsets, sampled)
        return self

    def _per_token(self, values: ArrayLike, field: str, kinds: str) -> NDArray[Any]:
        array = np.asarray(values)
        if array.shape != (len(self),):
            raise KeptTokensError(
                field, f"has shape {array.shape}, but must have one entry for each of {len(self)} tokens"
            )
        if array.size and array.dtype.kind not in kinds:
            wanted = "bool" if kinds == "b" else "integers"
            raise KeptTokensError(field, f"has dtype {array.dtype}, but must be {wanted}")
        return array.astype(bool if kinds == "b" else np.int64, copy=False)


def _unbase64(payload: Mapping[str, Any], field: str) -> bytes:
    if field not in payload:
        raise KeptTokensError(
            field, f"is missing; there are {sorted(payload)}, but both ids and counts are needed"
        )
    text = payload[field]
    if not isinstance(text, str):
        raise KeptTokensError(field, f"is {type(text).__name__}, but must be a string of base64")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character outside ASCII
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise KeptTokensError(
            field, f"{shown!r} is not base64 ({error}); send standard base64 with padding and no white space"
        ) from error
