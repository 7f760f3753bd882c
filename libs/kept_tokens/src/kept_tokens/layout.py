"""What orchestrator and trainer tell each other: MessagePack, positional structs (``array_like``).

The orchestrator writes :class:`TrainingBatch`, the trainer reads it and answers with :class:`StepResult`.
A new field is appended last and has a default: then an old reader reads a new payload (it skips what it does
not know) and a new reader an old one. Published fields never move, change type or go.
"""

import hashlib
import reprlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import from_buffer, int32_array, read_only, to_buffer
from .errors import KeptTokensError
from .payload import KeptTokens

T = TypeVar("T")

POLICY_GRADIENT = "policy_gradient"
CROSS_ENTROPY = "cross_entropy"
"""What a sample is trained with: ``TrainingSample.objective``."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not of the wanted form; the last for what is nested too deeply."""

UINT8, INT32, FLOAT32 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.float32)


class WeightSpan(NamedTuple):
    """The tokens ``start <= t < end`` of a sample were sampled by weight version ``version``."""

    version: int
    start: int
    end: int


class SampleArrays(NamedTuple):
    """The arrays of one sample, read-only, each [T]; views of its bytes where the type allows."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    advantages: NDArray[np.float32]


class TrainingSample(msgspec.Struct, array_like=True, frozen=True):
    """One sequence of T tokens to train on. Every array is little-endian bytes; :meth:`build` makes them."""

    token_ids: bytes
    """int32 [T]."""
    loss_mask: bytes
    """uint8 [T]; 1 = sampled by the policy, or said by a frozen generator (cross_entropy), and trained on.
    0 at t = 0: nothing predicts the first token."""
    logprobs: bytes
    """float32 [T]; the processed rollout logprob, 0 where loss_mask is 0; with cross_entropy all 0."""
    temperatures: bytes
    """float32 [T]."""
    advantages: bytes
    """float32 [T]; with cross_entropy the weight of each token."""
    source: str
    """The source (environment) it came from."""
    group: str
    """Samples of one prompt share their group."""
    sample_id: str
    """Names the sample in errors and logs."""
    weight_versions: list[WeightSpan]
    """Which tokens were sampled by which weights; ascending, not overlapping. Empty = not recorded."""
    kept_ids: bytes
    """int32; the ids of the kept sets. Empty together with kept_counts = no masks in this sample."""
    kept_counts: bytes
    """int32 [T]; counts[t] belongs to the token at t, 0 on context and at t = 0."""
    must_have_masks: bool
    """The source truncates: every token with loss_mask 1 has a count > 0."""
    objective: str = POLICY_GRADIENT
    """``"policy_gradient"``, with importance ratios, or ``"cross_entropy"``, which has none."""
    reference_logprobs: bytes = b""
    """float32 [T]; a reference's logprob of the token over its whole vocabulary, 0 where loss_mask is 0.
    Empty = there is none."""
    reference_weight: float = 0.0
    """The trainer adds this times (reference_logprobs - its own logprob over the whole vocabulary) to the
    advantages."""

    @classmethod
    def build(
        cls,
        *,
        token_ids: ArrayLike,
        loss_mask: ArrayLike,
        logprobs: ArrayLike,
        temperatures: ArrayLike,
        advantages: ArrayLike,
        kept: KeptTokens | None,
        must_have_masks: bool,
        source: str,
        group: str,
        sample_id: str,
        weight_versions: Iterable[tuple[int, int, int]] = (),
        objective: str = POLICY_GRADIENT,
        reference_logprobs: ArrayLike | None = None,
        reference_weight: float = 0.0,
    ) -> Self:
        """From arrays of T entries each; ``kept`` covers all T tokens (see ``KeptTokens.pad_tokens``).

        Values are converted, not judged: :func:`check_sample` does that.

        Raises:
            KeptTokensError: an array that the wire's type cannot hold.
        """
        kept_ids, kept_counts = (b"", b"") if kept is None else kept.to_bytes()
        return cls(
            token_ids=to_buffer(int32_array(token_ids, "token_ids", copy=False)),
            loss_mask=to_buffer(_mask_array(loss_mask)),
            logprobs=to_buffer(_float_array(logprobs, "logprobs")),
            temperatures=to_buffer(_float_array(temperatures, "temperatures")),
            advantages=to_buffer(_float_array(advantages, "advantages")),
            source=source,
            group=group,
            sample_id=sample_id,
            weight_versions=[WeightSpan(*span) for span in weight_versions],
            kept_ids=kept_ids,
            kept_counts=kept_counts,
            must_have_masks=must_have_masks,
            objective=objective,
            reference_logprobs=b""
            if reference_logprobs is None
            else to_buffer(_float_array(reference_logprobs, "reference_logprobs")),
            reference_weight=float(reference_weight),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids) // INT32.itemsize

    def arrays(self) -> SampleArrays:
        """Views of the bytes. Check the sample first."""
        return SampleArrays(
            token_ids=from_buffer(self.token_ids, INT32, "token_ids"),
            loss_mask=read_only(from_buffer(self.loss_mask, UINT8, "loss_mask") != 0),
            logprobs=from_buffer(self.logprobs, FLOAT32, "logprobs"),
            temperatures=from_buffer(self.temperatures, FLOAT32, "temperatures"),
            advantages=from_buffer(self.advantages, FLOAT32, "advantages"),
        )

    def reference(self) -> NDArray[np.float32] | None:
        """The reference's logprobs [T], or None if there are none."""
        if not self.reference_logprobs:
            return None
        return from_buffer(self.reference_logprobs, FLOAT32, "reference_logprobs")

    def kept(self) -> KeptTokens | None:
        """The kept sets of all T tokens, or None if the sample carries no masks."""
        if not self.kept_ids and not self.kept_counts:
            return None
        return KeptTokens.from_bytes(self.kept_ids, self.kept_counts)


class TrainingBatch(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """The samples of one optimiser step; :meth:`build` makes it, :func:`check_batch` judges it."""

    step: int
    """Counts from 1."""
    samples: list[TrainingSample]
    content_hash: bytes
    """blake2b-128 over the encoded samples, one after the other; 16 bytes."""

    @classmethod
    def build(cls, step: int, samples: Sequence[TrainingSample]) -> Self:
        """Compute the content hash."""
        samples = list(samples)
        return cls(step=step, samples=samples, content_hash=hash_samples(map(encode, samples)))

    def hash_of_content(self) -> bytes:
        """The hash of the samples as they are here, to compare with ``content_hash``.

        For a decoded batch it is the hash of the bytes as they arrived: a sample of another layout has other
        bytes when it is encoded again.
        """
        arrived: bytes | None = self.__dict__.get("arrived_hash")
        return hash_samples(map(encode, self.samples)) if arrived is None else arrived


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """What the trainer answers when a step is done."""

    step: int
    weight_version: int
    """The version published after this step."""
    metrics: dict[str, float]
    full_logprobs: list[bytes] = []
    """float32 [T] for each sample, in order: the logprob of the token over the whole vocabulary, by the
    weights before the step; 0 where it was not trained on. Empty unless trainer.full_vocabulary_scores."""


class BatchOnTheWire(msgspec.Struct, array_like=True):
    """TrainingBatch with the samples' own bytes, for their hash and for naming the one that is broken."""

    step: int
    samples: list[msgspec.Raw]
    content_hash: bytes


_ENCODER = msgspec.msgpack.Encoder()
_BATCH_DECODER = msgspec.msgpack.Decoder(BatchOnTheWire)
_SAMPLE_DECODER = msgspec.msgpack.Decoder(TrainingSample)


def hash_samples(encoded: Iterable[bytes | msgspec.Raw]) -> bytes:
    """blake2b-128 over encoded samples, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in encoded:
        digest.update(memoryview(sample))
    return digest.digest()


def encode(message: msgspec.Struct) -> bytes:
    """``message`` as MessagePack."""
    return _ENCODER.encode(message)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """``data`` as one of the structs of this module or of ``kept_tokens.answers``.

    Only the form is judged here; :func:`check_batch` and :func:`check_sample` judge the values.

    Raises:
        KeptTokensError: not MessagePack, or not of that type; names the sample where there is one.
    """
    if kind is TrainingBatch:
        return _decode_batch(data)  # type: ignore[return-value]
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise undecodable(kind.__name__, error) from error


def _decode_batch(data: bytes | bytearray | memoryview) -> TrainingBatch:
    envelope = decode_envelope(data)
    samples = [decode_sample(raw, index) for index, raw in enumerate(envelope.samples)]
    batch = TrainingBatch(envelope.step, samples, envelope.content_hash)
    batch.__dict__["arrived_hash"] = hash_samples(envelope.samples)
    return batch


def decode_envelope(data: bytes | bytearray | memoryview) -> BatchOnTheWire:
    """A batch with its samples undecoded.

    Raises:
        KeptTokensError: not of this form.
    """
    try:
        return _BATCH_DECODER.decode(data)
    except UNDECODABLE as error:
        raise undecodable("TrainingBatch", error) from error


def decode_sample(raw: msgspec.Raw, index: int) -> TrainingSample:
    """Sample ``index`` of a batch.

    Raises:
        KeptTokensError: not of this form; names the index.
    """
    try:
        return _SAMPLE_DECODER.decode(raw)
    except UNDECODABLE as error:
        raise undecodable("TrainingSample", error, index) from error


def undecodable(name: str, error: Exception, sample_index: int | None = None) -> KeptTokensError:
    """What to raise for something that is not of the form ``name``."""
    return KeptTokensError(
        name,
        f"cannot be decoded: {error}; writer and reader must use the layout of {__name__}",
        sample_index=sample_index,
    )


def _mask_array(values: ArrayLike) -> NDArray[np.uint8]:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "biu" or array.min() < 0 or array.max() > 1):
        raise KeptTokensError("loss_mask", f"{reprlib.repr(array.tolist())} has entries other than 0 and 1")
    return array.astype(np.uint8)


def _float_array(values: ArrayLike, field: str) -> NDArray[np.float32]:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "fiu":
        raise KeptTokensError(field, f"has dtype {array.dtype}, but must be numbers that float32 holds")
    with np.errstate(over="ignore"):  # becomes inf, which the check refuses where it matters
        return array.astype(np.float32)
