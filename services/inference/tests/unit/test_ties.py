"""Top-k is exact, whatever is tied."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset_inference.capture.ties import keep_top_k


def brute_force(logits: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Sort each row by (value descending, id ascending) and keep the first k."""
    kept = torch.full_like(logits, -torch.inf)
    for row, k in enumerate(top_k):
        order = sorted(range(logits.shape[1]), key=lambda i: (-logits[row, i].item(), i))[:k]
        kept[row, order] = logits[row, order]
    return kept


@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([2, 7, 50, 261]),
    levels=st.sampled_from([1, 2, 5, 1000]),
    masked=st.sampled_from([0.0, 0.3, 0.95]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_keeps_exactly_the_first_k_of_the_order_by_value_and_id(rows, vocabulary, levels, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, vocabulary), generator=generator) / 4.0
    logits[torch.rand(rows, vocabulary, generator=generator) < masked] = -torch.inf
    logits[:, seed % vocabulary] = 1.0
    top_k = torch.randint(1, vocabulary + 1, (rows,), generator=generator)
    kept = keep_top_k(logits.clone(), top_k, int(top_k.max()))
    assert torch.equal(kept, brute_force(logits, top_k.tolist()))


def test_of_a_flat_row_the_lowest_ids_stay():
    kept = keep_top_k(torch.zeros(1, 1000), torch.tensor([5]), 5)
    assert torch.isfinite(kept[0]).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_top_k_of_the_whole_vocabulary_changes_nothing():
    logits = torch.tensor([[3.0, 3.0, -torch.inf, 1.0]])
    assert torch.equal(keep_top_k(logits.clone(), torch.tensor([4]), 4), logits)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_different_width_do_not_mix(tied):
    logits = torch.arange(12.0).reshape(2, 6)
    if tied:
        logits[1] = 2.0
    kept = keep_top_k(logits.clone(), torch.tensor([1, 4]), 4)
    assert torch.isfinite(kept).sum(1).tolist() == [1, 4]
