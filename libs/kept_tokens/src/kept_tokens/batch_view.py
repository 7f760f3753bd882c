"""A batch that stays where it lies, such as in a mapped file: samples are decoded when they are asked for."""

from collections.abc import Sequence
from typing import overload

import msgspec

from .layout import (
    INT32,
    UNDECODABLE,
    TrainingSample,
    decode_envelope,
    decode_sample,
    hash_samples,
    undecodable,
)


class SamplesView(Sequence[TrainingSample]):
    """The samples of a batch; each access decodes one anew, so that only what is in use is in memory."""

    def __init__(self, encoded: Sequence[msgspec.Raw]) -> None:
        """``encoded`` are views of the batch's bytes."""
        self._encoded = encoded

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._encoded)

    @overload
    def __getitem__(self, index: int) -> TrainingSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingSample]: ...

    def __getitem__(self, index: int | slice) -> TrainingSample | list[TrainingSample]:
        """Decoded; a slice is a list.

        Raises:
            KeptTokensError: not a sample; names its index.
        """
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return decode_sample(self._encoded[index], index)

    def lengths(self) -> list[int]:
        """Tokens of each sample, read off its first bytes: the rest of it is not touched.

        Raises:
            KeptTokensError: as indexing.
        """
        lengths = []
        for index, raw in enumerate(self._encoded):
            try:
                lengths.append(len(_HEAD_DECODER.decode(raw).token_ids) // INT32.itemsize)
            except UNDECODABLE as error:
                raise undecodable("TrainingSample", error, index) from error
        return lengths


class BatchView:
    """A :class:`TrainingBatch` over bytes that nobody changes; :func:`check_batch` judges it like one.

    Opening one reads the samples' headers only, however large they are. ``samples`` are decoded one at a
    time: a reader of some of them touches the bytes of these alone.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        """Of an encoded batch.

        Raises:
            KeptTokensError: not MessagePack, or not of the form of a batch; samples are not looked into.
        """
        envelope = decode_envelope(data)
        self.step = envelope.step
        self.content_hash = envelope.content_hash
        self.samples = SamplesView(envelope.samples)
        self._encoded = envelope.samples

    def hash_of_content(self) -> bytes:
        """The hash of the samples as they lie here, to compare with ``content_hash``. Reads all of them."""
        return hash_samples(self._encoded)


class _Head(msgspec.Struct, array_like=True):
    """The beginning of a sample; a memoryview is not a copy."""

    token_ids: memoryview


_HEAD_DECODER = msgspec.msgpack.Decoder(_Head)
