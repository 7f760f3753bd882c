"""KeptTokens itself: laws, forms, and what construction refuses."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept_tokens import KeptTokens, KeptTokensError

ids = st.integers(0, 2**31 - 1)
rows = st.lists(st.lists(ids, unique=True, max_size=9), max_size=12)
payloads = rows.map(KeptTokens.from_rows)


# Laws


@given(rows)
def test_every_form_round_trips(given_rows: list[list[int]]) -> None:
    kept = KeptTokens.from_rows(given_rows)
    assert kept.rows() == given_rows
    assert KeptTokens.from_base64(json.loads(json.dumps(kept.to_base64()))) == kept
    assert KeptTokens.from_bytes(*kept.to_bytes()) == kept
    assert KeptTokens.from_sampling_mask(kept.to_sampling_mask()) == kept
    assert pickle.loads(pickle.dumps(kept)) == kept
    padded = kept.to_padded()
    assert [[i for i in row if i >= 0] for row in padded.tolist()] == given_rows


@given(payloads, st.data())
def test_slices_concatenate_to_the_whole(kept: KeptTokens, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(kept)))
    left, right = kept.slice(0, cut), kept.slice(cut)
    assert KeptTokens.concat([left, right]) == kept
    assert left.rows() + right.rows() == kept.rows()
    np.testing.assert_array_equal(right.offsets, KeptTokens(right.ids, right.counts).offsets)


@given(payloads, st.integers(0, 5), st.integers(0, 5))
def test_padding_adds_tokens_without_a_mask(kept: KeptTokens, left: int, right: int) -> None:
    padded = kept.pad_tokens(left, right)
    assert padded.rows() == [[]] * left + kept.rows() + [[]] * right
    assert padded.slice(left, left + len(kept)) == kept


@given(payloads)
def test_sorted_is_ascending_and_keeps_the_sets(kept: KeptTokens) -> None:
    assert kept.sorted().rows() == [sorted(row) for row in kept.rows()]
    assert (kept.sorted() is kept) == (kept.rows() == kept.sorted().rows())


@given(st.binary(max_size=40), st.binary(max_size=24))
def test_bytes_either_decode_exactly_or_are_refused(raw_ids: bytes, raw_counts: bytes) -> None:
    try:
        kept = KeptTokens.from_bytes(raw_ids, raw_counts)
    except KeptTokensError:
        return
    assert kept.to_bytes() == (raw_ids, raw_counts)
    assert all(len(set(row)) == len(row) and min(row, default=0) >= 0 for row in kept.rows())


@given(st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=8))
def test_a_duplicate_is_found_exactly_where_there_is_one(given_rows: list[list[int]]) -> None:
    first = next((n for n, row in enumerate(given_rows) if len(set(row)) < len(row)), None)
    if first is None:
        assert KeptTokens.from_rows(given_rows).rows() == given_rows
    else:
        with pytest.raises(KeptTokensError, match=f"ids at position {first}: .* twice"):
            KeptTokens.from_rows(given_rows)


@given(st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=8), st.data())
def test_sampled_ids_are_judged_like_a_loop_would(given_rows: list[list[int]], data: st.DataObject) -> None:
    sampled = [data.draw(st.integers(0, 5)) for _ in given_rows]
    kept = KeptTokens.from_rows(given_rows)
    pairs = zip(given_rows, sampled, strict=True)
    wrong = [n for n, (row, token) in enumerate(pairs) if row and token not in row]
    if not wrong:
        assert kept.check(sampled_ids=sampled) is kept
        return
    first = wrong[0]
    with pytest.raises(KeptTokensError, match=f"sampled_ids at position {first}: .* {sampled[first]} is not"):
        kept.check(sampled_ids=sampled)


# What it holds


def test_arrays_are_int32_and_read_only() -> None:
    kept = KeptTokens.from_rows([[3, 17], [5], []])
    assert (kept.ids.dtype, kept.counts.dtype, kept.offsets.dtype) == (np.int32, np.int32, np.int64)
    assert kept.offsets.tolist() == [0, 2, 3, 3]
    assert len(kept) == kept.num_tokens == 3
    for array in (kept.ids, kept.counts, kept.offsets, kept.slice(1).ids, kept.slice(1).offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_attributes_cannot_be_replaced() -> None:
    kept = KeptTokens.from_rows([[1]])
    with pytest.raises(AttributeError, match="immutable"):
        kept.ids = np.zeros(1, np.int32)
    with pytest.raises(AttributeError, match="immutable"):
        del kept.counts


def test_construction_copies_unless_told_not_to() -> None:
    mine = np.array([3, 4], np.int32)
    copied, viewed = KeptTokens(mine, [2]), KeptTokens(mine, [2], copy=False)
    mine[0] = 1
    assert copied.rows() == [[3, 4]]
    assert viewed.rows() == [[1, 4]]
    assert mine.flags.writeable


def test_a_buffer_that_can_change_is_copied() -> None:
    buffer = bytearray(np.array([3], "<i4").tobytes())
    kept = KeptTokens.from_bytes(buffer, np.array([1], "<i4").tobytes())
    buffer[0] = 9
    assert kept.rows() == [[3]]


def test_equal_payloads_hash_alike_and_order_matters() -> None:
    one, same, other = (KeptTokens.from_rows(r) for r in ([[1, 2]], [[1, 2]], [[2, 1]]))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one == other.sorted()
    assert one != [[1, 2]]
    assert KeptTokens.from_rows([[1], [2]]) != one


def test_repr_shows_rows_or_sizes() -> None:
    assert repr(KeptTokens.from_rows([[3, 17], []])) == "KeptTokens.from_rows([[3, 17], []])"
    assert repr(KeptTokens.from_rows([[1, 2]] * 9)) == "<KeptTokens: 9 tokens, 9 with a mask, 18 ids>"


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint32, ">i4", np.int16])
def test_other_integers_are_taken_if_they_fit(dtype: object) -> None:
    kept = KeptTokens(np.array([3, 4], dtype), np.array([2], dtype))  # type: ignore[call-overload]
    assert kept.rows() == [[3, 4]]
    assert kept.ids.dtype == np.int32


def test_rows_may_be_arrays() -> None:
    assert KeptTokens.from_rows([np.array([3, 1]), np.array([], np.int64)]).rows() == [[3, 1], []]
    assert KeptTokens.from_rows([np.array([3]), [1]]).rows() == [[3], [1]]


def test_padded_width_and_fill() -> None:
    kept = KeptTokens.from_rows([[3, 17], []])
    assert kept.to_padded().tolist() == [[3, 17], [-1, -1]]
    assert kept.to_padded(3, fill=-7).tolist() == [[3, 17, -7], [-7, -7, -7]]
    assert KeptTokens((), ()).to_padded().shape == (0, 0)
    with pytest.raises(KeptTokensError, match="counts at position 0: 2 ids do not fit"):
        kept.to_padded(1)
    with pytest.raises(KeptTokensError, match="fill"):
        kept.to_padded(fill=0)


def test_nothing_concatenates_to_nothing() -> None:
    assert len(KeptTokens.concat([])) == 0


# What is refused


@pytest.mark.parametrize(
    ("given_ids", "counts", "text"),
    [
        ([1.5], [1], "ids: has dtype float64"),
        ([True], [1], "ids: has dtype bool"),
        ([[1, 2]], [2], r"ids: has shape \(1, 2\)"),
        ([2**31], [1], "ids: entry 0 is 2147483648, which does not fit int32"),
        ([2**70], [1], "ids: "),
        (np.array([1, 2**63], np.uint64), [2], "ids: entry 1 is 9223372036854775808"),
        ([1], 1, r"counts: has shape \(\)"),
        ([[1], [2, 3]], [3], "ids: not an array of integers"),
        (np.array([], np.float32), [], "ids: has dtype float32"),
        ([7, 8, -2], [1, 0, 2], "ids at position 2: -2 is negative"),
        ([4, 9, 4], [3], "ids at position 0: 4 occurs twice"),
        ([1], [2, -1], "counts at position 1: -1 is negative"),
        ([1], [2], "counts: sum to 2, but there are 1 ids"),
        ([], [2**31 - 1, 2**31 - 1, 2], "counts: sum to 4294967296"),
    ],
)
def test_construction_refuses(given_ids: object, counts: object, text: str) -> None:
    # verifiers 0.3: counts that do not fit the tokens: mask dropped silently
    with pytest.raises(KeptTokensError, match=text):
        KeptTokens(given_ids, counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_rows", "text"),
    [
        ([[1], [2, 3.0]], "ids at position 1: 3.0 is no integer"),
        ([[1], [True]], "ids at position 1: True is no integer"),
        ([[1], ["2"]], "ids at position 1: '2' is no integer"),
        ([[1], None], "ids at position 1: is NoneType"),
        ([[1], 2], "ids at position 1: is int"),
    ],
)
def test_rows_refuse(given_rows: list[list[int]], text: str) -> None:
    with pytest.raises(KeptTokensError, match=text):
        KeptTokens.from_rows(given_rows)
    with pytest.raises(KeptTokensError, match=text.replace("ids", "sampling_mask")):
        KeptTokens.from_sampling_mask(given_rows)


@pytest.mark.parametrize("payload", [None, [[1]], "AQAAAA=="])
def test_a_payload_must_be_an_object(payload: object) -> None:
    with pytest.raises(KeptTokensError, match="kept_tokens: is"):
        KeptTokens.from_base64(payload)  # type: ignore[arg-type]


@pytest.mark.parametrize("span", [(-1, 1), (0, 3), (2, 1)])
def test_slices_outside_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(KeptTokensError, match="slice"):
        KeptTokens.from_rows([[1], [2]]).slice(*span)


def test_negative_padding_is_refused() -> None:
    with pytest.raises(KeptTokensError, match="left=-1"):
        KeptTokens.from_rows([[1]]).pad_tokens(-1, 0)


# What a reader asks


def test_masks_may_be_required_of_some_tokens_only() -> None:
    kept = KeptTokens.from_rows([[], [1], []])
    kept.check(require_masks=[False, True, False])
    kept.check(require_masks=np.array([0, 1, 0], bool))
    with pytest.raises(KeptTokensError, match=r"counts at position 2: 0, .* \(1 of 3 tokens"):
        kept.check(require_masks=[False, True, True])
    with pytest.raises(KeptTokensError, match=r"counts at position 0: 0, .* \(2 of 3 tokens"):
        kept.check(require_masks=True)
    with pytest.raises(KeptTokensError, match="require_masks: has shape"):
        kept.check(require_masks=[True])
    with pytest.raises(KeptTokensError, match="require_masks: has dtype"):
        kept.check(require_masks=[0, 1, 0])


def test_sampled_ids_must_be_integers_of_every_token() -> None:
    kept = KeptTokens.from_rows([[1], [2]])
    with pytest.raises(KeptTokensError, match="sampled_ids: has shape"):
        kept.check(sampled_ids=[1])
    with pytest.raises(KeptTokensError, match="sampled_ids: has dtype"):
        kept.check(sampled_ids=[1.0, 2.0])
    kept.check(sampled_ids=np.array([1, 2], np.int64))


def test_error_carries_its_facts() -> None:
    with pytest.raises(KeptTokensError) as caught:
        KeptTokens.from_rows([[5], [100]]).check(vocab_size=100)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.field, error.position, error.sample_id) == ("ids", 1, None)
    assert str(error) == str(caught.value)
    assert isinstance(error, ValueError)
    inside = error.in_sample("s-9", 4)
    assert str(inside).startswith("sample 4 (id 's-9'): ids at position 1: 100 ")
