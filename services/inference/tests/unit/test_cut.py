"""The cut against sorting, on the host and by the Triton kernel: on a GPU, or without one in its
interpreter.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keptset_inference.capture import cut
from keptset_inference.capture.cut import (
    NO_SET,
    PAD,
    WIDTH,
    chunk_of,
    cut_on_device,
    cut_on_host,
    cut_rows,
)

Cut = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernel = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Many blocks in a small vocabulary; on a GPU as they are."""
    if find_spec("triton") is not None and DEVICE == "cpu":
        kernels = import_module("keptset_inference.capture.cut_kernel")
        for name, value in {"CHUNK": 8, "READ": 256, "WORK": 128, "CANDIDATES": 64}.items():
            monkeypatch.setattr(kernels, name, value)


def by_kernel(logits: Tensor, top_k: Tensor, top_p: Tensor, limit: int, width: int) -> Tensor:
    """The kernel, with arguments of the host."""
    moved = logits.to(DEVICE)
    columns = cut_on_device(moved, top_k.int().to(DEVICE), top_p.to(DEVICE), limit, width)
    logits.copy_(moved)
    return columns.cpu()


def by_host(logits: Tensor, top_k: Tensor, top_p: Tensor, limit: int, width: int) -> Tensor:
    return cut_rows(logits, top_k, top_p, limit, width)


BOTH = pytest.mark.parametrize("cut_of", [by_host, pytest.param(by_kernel, marks=needs_kernel)])


def sets_of(row: Tensor, k: int, p: float, limit: int) -> list[list[int]]:
    """The right set by sorting; two where the mass before an id is p to the last digits."""
    values = row.double().numpy().copy()
    values[limit:] = -np.inf
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    order = [i for i in order if values[i] > -np.inf]
    if not order:
        return [[]]
    weights = np.exp(values[order] - values[order[0]])
    before = (np.cumsum(weights) - weights) / weights.sum()
    return (
        [sorted(np.array(order)[before < edge]) for edge in (p - 1e-5, p, p + 1e-5)]
        if p < 1
        else [sorted(order)]
    )


def check(
    cut_of: Cut, logits: Tensor, top_k: list[int], top_p: list[float], limit: int | None = None
) -> None:
    """Sets, sizes, padding, and that the row holds the set and nothing else, values untouched."""
    limit = logits.shape[1] if limit is None else limit
    width = max(top_k)
    left = logits.clone()
    columns = cut_of(left, torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), limit, width)
    assert columns.dtype == torch.int32
    assert columns.shape == (len(logits), 1 + width)
    for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        size = int(columns[row, 0])
        if k == 0:
            assert size == NO_SET
            assert torch.equal(left[row], logits[row])
            continue
        ids = columns[row, 1 : 1 + size].tolist()
        assert ids in sets_of(logits[row], k, p, limit), (row, k, p)
        assert (columns[row, 1 + size :] == PAD).all()
        kept = torch.full_like(logits[row], -torch.inf)
        kept[ids] = logits[row, ids]
        assert torch.equal(left[row], kept)


def drawn(rows: int, vocabulary: int, levels: int, masked: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (rows, vocabulary), generator=generator) / 4.0
    if levels > 100:
        logits = torch.randn(rows, vocabulary, generator=generator) * 3
    logits[torch.rand(rows, vocabulary, generator=generator) < masked] = -torch.inf
    return logits


@given(
    vocabulary=st.sampled_from([2, 7, 50, 261, 700]),
    levels=st.sampled_from([1, 2, 5, 1000]),
    masked=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    p=st.sampled_from([1.0, 0.95, 0.5, 1e-7]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150)
def test_a_row_is_left_with_exactly_its_set(vocabulary, levels, masked, p, seed):
    # sglang#37873, sglang#36631: ties at the cutoff: more than top_k kept
    logits = drawn(4, vocabulary, levels, masked, seed)
    top = min(vocabulary, 512)
    top_k = torch.randint(0, top + 1, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    top_k[0] = top_k[0] or top
    check(by_host, logits, top_k, [p, 1.0, p, 0.9])


@needs_kernel
@given(
    vocabulary=st.sampled_from([2, 63, 64, 65, 700]),
    levels=st.sampled_from([1, 3, 1000]),
    masked=st.sampled_from([0.0, 0.95]),
    p=st.sampled_from([1.0, 0.9, 1e-7]),
    k=st.sampled_from([1, 2, 8, 512]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15)
def test_the_kernel_does_the_same(vocabulary, levels, masked, p, k, seed):
    logits = drawn(2, vocabulary, levels, masked, seed)
    check(by_kernel, logits, [0, min(k, vocabulary)], [1.0, p], limit=vocabulary - vocabulary // 9)


@needs_kernel
@pytest.mark.parametrize("vocabulary", [8192, 32000, 32064, 33000, 50257, 65536, 151936])
def test_no_vocabulary_has_more_candidates_than_there_is_room_for(vocabulary):
    """The widest set of a row without ties: what is above the 512th of the chunks' largest values."""
    kernels = import_module("keptset_inference.capture.cut_kernel")
    chunk = chunk_of(vocabulary, kernels.CHUNK)
    values = np.random.default_rng(0).normal(size=vocabulary)
    largest = np.pad(values, (0, -vocabulary % chunk), constant_values=-np.inf).reshape(-1, chunk).max(1)
    assert (values >= np.sort(largest)[-WIDTH]).sum() < kernels.CANDIDATES


@BOTH
def test_a_vocabulary_of_several_blocks(cut_of, small_blocks):
    """The second row has more candidates than there is room for, though nothing is tied."""
    logits = drawn(3, 611, 1000, 0.0, seed=5)
    logits[1, 300:500] += 40
    check(cut_of, logits, [40, 100, 8], [1.0, 0.97, 0.9], limit=600)


@BOTH
def test_of_a_flat_row_the_lowest_ids_stay(cut_of, small_blocks):
    """More tied than the kernel has candidates for."""
    logits = torch.zeros(2, 200)
    logits[1, ::2] = -0.0
    logits[0, 150] = 1.0
    check(cut_of, logits, [5, 100], [0.5, 0.999], limit=199)


@BOTH
def test_a_row_without_an_id_has_an_empty_set(cut_of):
    check(cut_of, torch.full((1, 100), -torch.inf), [3], [0.9])
    check(cut_of, torch.tensor([[1.0, -torch.inf, 2.0]]), [3], [0.9], limit=2)


@BOTH
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_row_with_what_is_no_number_is_reported(cut_of, odd):
    logits = drawn(3, 300, 1000, 0.0, seed=1)
    logits[1, 77] = odd
    left = logits.clone()
    columns = cut_of(left, torch.tensor([3, 3, 3]).int(), torch.tensor([0.9, 0.9, 0.9]), 300, 3)
    assert columns[:, 0].tolist()[1] == PAD
    assert torch.equal(left[1].nan_to_num(), logits[1].nan_to_num())
    assert (columns[[0, 2], 0] <= 3).all()
    beyond = logits.clone()
    columns = cut_of(beyond, torch.tensor([3, 3, 3]).int(), torch.ones(3), 77, 3)
    assert columns[:, 0].tolist() == [3, 3, 3], "ids that nobody may sample do not matter"


@BOTH
def test_a_stride_between_rows_is_followed(cut_of):
    whole = drawn(2, 400, 1000, 0.0, seed=2)
    view = whole.clone()[:, :300]
    columns = cut_of(view, torch.tensor([4, 4]).int(), torch.ones(2), 300, 4)
    other = whole[:, :300].contiguous()
    assert torch.equal(columns, cut_of(other, torch.tensor([4, 4]).int(), torch.ones(2), 300, 4))
    assert torch.equal(view, other)


@needs_kernel
def test_a_row_that_begins_beyond_two_to_the_31_is_cut_as_another(tmp_path):
    # 14,200 rows of a vocabulary of 151,936 reach that; without a GPU the memory is a file with a hole
    stride = 2**30 + 8
    size = 2 * stride + 300
    if DEVICE == "cuda":
        memory = torch.zeros(size, device=DEVICE)
    else:
        memory = torch.from_file(str(tmp_path / "hole"), shared=True, size=size, dtype=torch.float32)
    logits, other = memory.as_strided((3, 300), (stride, 1)), drawn(3, 300, 1000, 0.0, seed=3)
    logits.copy_(other)
    arguments = torch.tensor([4, 0, 9]).int().to(DEVICE), torch.tensor([1.0, 1.0, 0.9]).to(DEVICE), 300, 9
    columns = cut_on_device(logits, *arguments)
    assert torch.equal(columns.cpu()[:, 0] < 0, torch.tensor([False, True, False]))
    alone = other.clone().to(DEVICE)
    assert torch.equal(cut_on_device(alone, *arguments)[::2], columns[::2])
    assert torch.equal(alone, logits)


def test_all_rows_without_a_set_are_left_alone():
    logits = drawn(2, 10, 1000, 0.0, seed=2)
    assert cut_on_host is cut.cut_on_host
    columns = cut_rows(logits, torch.zeros(2).int(), torch.ones(2), 10, 0)
    assert columns.tolist() == [[NO_SET], [NO_SET]]


@BOTH
@pytest.mark.parametrize(("top_p", "size"), [(0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4)])
def test_a_nucleus_ends_where_its_mass_is_reached(cut_of, top_p, size):
    """Four equal ids of a quarter each: the one that reaches top_p is the last."""
    four = torch.tensor([4], dtype=torch.int32)
    columns = cut_of(torch.zeros(1, 4), four, torch.tensor([top_p]), 4, 4)
    assert columns[0, : 1 + size].tolist() == [size, *range(size)]
