"""What must be true of training samples: the same check where they are written and where they are read."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch_view import BatchView
from .errors import KeptTokensError
from .layout import CROSS_ENTROPY, FLOAT32, INT32, POLICY_GRADIENT, UINT8, TrainingBatch, TrainingSample
from .payload import KeptTokens

NO_EVIDENCE = -9999.0
"""What clients of vLLM read as "no logprob"; never valid for a trained token."""

MIN_TEMPERATURE = 0.01
"""vLLM clamps lower temperatures, so the recorded one would not be the one sampled with."""

BYTES_AT_ONCE = 1 << 22
"""Ids of samples that are checked together: enough that numpy's share is large, little beside a batch."""

_ITEM_SIZES = {
    "loss_mask": UINT8.itemsize,
    "logprobs": FLOAT32.itemsize,
    "temperatures": FLOAT32.itemsize,
    "advantages": FLOAT32.itemsize,
}


def check_sample(sample: TrainingSample, vocab_size: int | None = None) -> None:
    """Verify everything that one sample promises.

    At least one token; every array has T entries; ids are inside the vocabulary; loss_mask is 0 or 1, and 0
    at t = 0; at loss tokens logprobs are finite, <= 0, not -9999, and temperatures at least 0.01; elsewhere
    logprobs are 0; temperatures and advantages are finite; weight spans ascend, do not overlap, are not empty
    and, if there are any, cover every loss token; kept sets are well formed, empty wherever loss_mask is 0,
    contain the sampled id, and are there on every loss token of a sample that must have masks. The objective
    is known; with cross_entropy there are no rollout logprobs, versions, kept sets or reference. Reference
    logprobs are finite and <= 0 at loss tokens and 0 elsewhere, and there are some if they have a weight.

    Raises:
        KeptTokensError: the text names the sample, the field, the position, the value and the way out.
    """
    try:
        _check_lengths(sample)
        _check_objective(sample)
        _check_spans(sample)
        _check_values([sample], vocab_size)
    except KeptTokensError as error:
        raise error.in_sample(sample.sample_id) from None


def check_batch(batch: TrainingBatch | BatchView, vocab_size: int | None = None) -> None:
    """Verify the step number, the content hash and every sample.

    Raises:
        KeptTokensError: the text names the index and id of the first sample that is wrong.
    """
    if batch.step < 1:
        raise KeptTokensError("step", f"{batch.step}, but steps count from 1")
    if not batch.samples:
        raise KeptTokensError("samples", "is empty; a step needs at least one sample")
    actual = batch.hash_of_content()
    if batch.content_hash != actual:
        raise KeptTokensError(
            "content_hash",
            f"{batch.content_hash.hex()!r}, but the samples hash to {actual.hex()!r}; "
            "they were changed after TrainingBatch.build, or damaged on the way: send the batch again",
        )
    check_samples(batch.samples, vocab_size)


def check_samples(
    samples: Iterable[TrainingSample],
    vocab_size: int | None = None,
    indices: Iterable[int] | None = None,
) -> None:
    """:func:`check_sample` for each of them, but over the tokens of many at once.

    Args:
        samples: gone through once; some megabytes of them are held at a time.
        vocab_size: as in :func:`check_sample`.
        indices: of the samples in their batch, which errors carry; None = 0, 1, 2 ...

    Raises:
        KeptTokensError: as :func:`check_sample`, with the index as well.
    """
    together: list[tuple[int, TrainingSample]] = []
    size = 0
    for index, sample in zip(itertools.count() if indices is None else indices, samples, strict=False):
        together.append((index, sample))
        size += len(sample.token_ids) + len(sample.kept_ids)
        if size >= BYTES_AT_ONCE:
            _check_together(together, vocab_size)
            together, size = [], 0
    if together:
        _check_together(together, vocab_size)


def _check_together(numbered: Sequence[tuple[int, TrainingSample]], vocab_size: int | None) -> None:
    samples = [sample for _, sample in numbered]
    try:
        for sample in samples:
            _check_lengths(sample)
            _check_objective(sample)
            _check_spans(sample)
        _check_values(samples, vocab_size)
    except KeptTokensError:
        for index, sample in numbered:  # now slowly: which sample is it?
            try:
                check_sample(sample, vocab_size)
            except KeptTokensError as error:
                raise error.in_sample(sample.sample_id, index) from None
        raise AssertionError("all samples together are refused, but none of them alone") from None


def _check_lengths(sample: TrainingSample) -> None:
    tokens, odd = divmod(len(sample.token_ids), INT32.itemsize)
    if odd:
        raise KeptTokensError("token_ids", f"{len(sample.token_ids)} bytes are no whole number of int32")
    if tokens == 0:
        raise KeptTokensError("token_ids", "is empty; a sample has at least one token")
    for field, size in _ITEM_SIZES.items():
        length = len(getattr(sample, field))
        if length != tokens * size:
            raise KeptTokensError(
                field, f"has {length} bytes, but {tokens} tokens of {size} bytes make {tokens * size}"
            )
    if len(sample.reference_logprobs) not in (0, tokens * FLOAT32.itemsize):
        raise KeptTokensError(
            "reference_logprobs",
            f"has {len(sample.reference_logprobs)} bytes, but {tokens} tokens of 4 bytes make {tokens * 4}",
        )
    if not sample.kept_counts and not sample.kept_ids:
        return
    if len(sample.kept_counts) != tokens * INT32.itemsize:
        raise KeptTokensError(
            "kept_counts",
            f"has {len(sample.kept_counts)} bytes, but {tokens} tokens of 4 bytes make {tokens * 4}; "
            "there is one count a token, 0 on context (KeptTokens.pad_tokens adds those)",
        )
    counts = np.frombuffer(sample.kept_counts, "<i4")
    total = int(counts.sum(dtype=np.int64))
    if total * INT32.itemsize != len(sample.kept_ids):
        raise KeptTokensError(
            "kept_counts", f"sum to {total}, but kept_ids has {len(sample.kept_ids)} bytes, not {total} x 4"
        )


def _check_objective(sample: TrainingSample) -> None:
    if sample.objective not in (POLICY_GRADIENT, CROSS_ENTROPY):
        raise KeptTokensError(
            "objective", f"{sample.objective!r} is neither {POLICY_GRADIENT!r} nor {CROSS_ENTROPY!r}"
        )
    if sample.objective == CROSS_ENTROPY:
        # Another model said this: there is nothing to replay and no ratio.
        for field, there in (
            ("logprobs", any(sample.logprobs)),
            ("weight_versions", sample.weight_versions),
            ("kept_ids", sample.kept_ids),
            ("must_have_masks", sample.must_have_masks),
            ("reference_logprobs", sample.reference_logprobs),
        ):
            if there:
                raise KeptTokensError(
                    field,
                    f"is set, but {CROSS_ENTROPY!r} has no importance ratio; leave it empty",
                )
    if not math.isfinite(sample.reference_weight) or sample.reference_weight < 0:
        raise KeptTokensError("reference_weight", f"{sample.reference_weight} is not finite and >= 0")
    if sample.reference_weight > 0 and not sample.reference_logprobs:
        raise KeptTokensError(
            "reference_logprobs", f"is empty, but reference_weight is {sample.reference_weight}; send both"
        )


def _check_spans(sample: TrainingSample) -> None:
    spans = sample.weight_versions
    if not spans:
        return
    tokens = sample.num_tokens
    at = 0
    for version, start, end in spans:
        if version < 0:
            raise KeptTokensError("weight_versions", f"version {version} is negative", position=start)
        if not at <= start < end <= tokens:
            raise KeptTokensError(
                "weight_versions",
                f"span {start}:{end} of version {version} is empty, starts before the last one's end {at}, "
                f"or leaves the {tokens} tokens; spans ascend, start < end, and count over the whole sample",
                position=start,
            )
        at = end
    uncovered = np.frombuffer(sample.loss_mask, UINT8) != 0
    for _, start, end in spans:
        uncovered[start:end] = False
    _refuse(
        uncovered,
        "weight_versions",
        "no span covers this loss token; record who sampled it, or no span at all",
    )


def _check_values(samples: Sequence[TrainingSample], vocab_size: int | None) -> None:
    """Check the tokens of all samples as if they were one sequence; lengths are known to fit."""

    def joined(field: str, kind: str) -> NDArray[Any]:
        return np.frombuffer(b"".join([getattr(sample, field) for sample in samples]), kind)

    token_ids = joined("token_ids", "<i4").astype(np.int32, copy=False)
    loss_mask = joined("loss_mask", "u1")
    logprobs = joined("logprobs", "<f4")
    temperatures = joined("temperatures", "<f4")
    advantages = joined("advantages", "<f4")
    lengths = np.array([sample.num_tokens for sample in samples])
    loss = loss_mask != 0

    _refuse(token_ids < 0, "token_ids", "is negative; token ids are >= 0", token_ids)
    if vocab_size is not None:
        _refuse(
            token_ids >= vocab_size,
            "token_ids",
            f"is outside the vocabulary of {vocab_size}; rollout and trainer must use the same model",
            token_ids,
        )
    _refuse(loss_mask > 1, "loss_mask", "is neither 0 nor 1", loss_mask)
    first = np.zeros(len(loss), bool)
    first[np.cumsum(lengths) - lengths] = True
    _refuse(
        loss & first, "loss_mask", "is 1 on the first token, which nothing predicts; set it to 0", loss_mask
    )

    _refuse(
        loss & ~np.isfinite(logprobs),
        "logprobs",
        "is not finite at a loss token; the rollout is broken",
        logprobs,
    )
    _refuse(
        loss & (logprobs == NO_EVIDENCE),
        "logprobs",
        'means "no evidence" and cannot be trained on; the rollout must answer with the processed logprob',
        logprobs,
    )
    _refuse(loss & (logprobs > 0), "logprobs", "is above 0; a logprob is the log of a probability", logprobs)
    _refuse(~loss & (logprobs != 0), "logprobs", "is not 0, but loss_mask is 0 here; write 0 there", logprobs)
    _refuse(~np.isfinite(temperatures), "temperatures", "is not finite", temperatures)
    _refuse(
        loss & (temperatures < np.float32(MIN_TEMPERATURE)),
        "temperatures",
        f"is below {MIN_TEMPERATURE} at a loss token, where the engine clamps it: not what was sampled with",
        temperatures,
    )
    _refuse(
        ~np.isfinite(advantages), "advantages", "is not finite; look at the rewards of its group", advantages
    )
    reference = np.frombuffer(
        b"".join([one.reference_logprobs or bytes(4 * one.num_tokens) for one in samples]), "<f4"
    )
    wrong = ~np.isfinite(reference) | (reference > 0) | (reference == NO_EVIDENCE)
    _refuse(wrong, "reference_logprobs", "is no logprob (finite, <= 0, not -9999)", reference)
    _refuse(~loss & (reference != 0), "reference_logprobs", "is not 0, but loss_mask is 0 here", reference)
    _check_kept(samples, lengths, token_ids, loss, vocab_size)


def _check_kept(
    samples: Sequence[TrainingSample],
    lengths: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    loss: NDArray[np.bool_],
    vocab_size: int | None,
) -> None:
    counts = b"".join([sample.kept_counts or bytes(4 * sample.num_tokens) for sample in samples])
    ids = b"".join([sample.kept_ids for sample in samples])
    try:
        kept = KeptTokens.from_bytes(ids, counts)
        kept.check(vocab_size=vocab_size, sampled_ids=token_ids)
        required = loss & np.repeat([sample.must_have_masks for sample in samples], lengths)
        kept.check(require_masks=required)
    except KeptTokensError as error:
        names = {"ids": "kept_ids", "counts": "kept_counts", "sampled_ids": "token_ids"}
        raise KeptTokensError(names[error.field], error.problem, position=error.position) from None
    _refuse(
        ~loss & (kept.counts != 0),
        "kept_counts",
        "is a kept set on a token with loss_mask 0; counts[t] belongs to the token at t, not to the one that "
        "predicts it, and is 0 on context",
        kept.counts,
    )


def _refuse(wrong: NDArray[np.bool_], field: str, problem: str, values: NDArray[Any] | None = None) -> None:
    """Raise for the first position where ``wrong`` is set; ``problem`` follows the value there."""
    if wrong.any():
        position = int(wrong.argmax())
        said = problem if values is None else f"{values[position]!s} {problem}"
        raise KeptTokensError(field, said, position=position)
