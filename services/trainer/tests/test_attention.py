"""Attention over packed rows by the variable-length kernel: what a mask gives, in any transformers model."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, PreTrainedModel

from keptset_trainer import cudnn_ragged
from keptset_trainer.attention import VARLEN, attend, batch_attention, spans
from keptset_trainer.cudnn_ragged import Name
from keptset_trainer.model import Policy, prove

LENGTHS = [5, 1, 9, 3]


def row(lengths: list[int], heads: int, key_heads: int, size: int = 8) -> list[torch.Tensor]:
    """q, k, v [L, heads, size] and a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), count, size) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).float() for shape in shapes]


def masked(q: Any, k: Any, v: Any, lengths: list[int], window: int) -> torch.Tensor:
    """The whole matrix of one row, with a mask."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(sum(lengths))
    back = at[:, None] - at[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & (back >= 0)
    if window >= 0:
        seen &= back <= window
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, keys) * 0.3
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.sampled_from([-1, 0, 2]), st.booleans())
@settings(max_examples=20)
def test_the_kernel_is_attention_with_a_mask(lengths, window, grouped):
    q, k, v, grad = row(lengths, 4, 2 if grouped else 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    got, logsumexp = torch.ops.keptset.varlen_attention(*leaves, borders, max(lengths), 0.3, window)
    want = masked(*leaves, lengths, window)
    assert logsumexp.shape == (4, sum(lengths))
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(
        torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_row_of_equal_sequences_is_a_batch():
    q, k, v, _ = row([6, 6, 6], 4, 2)
    torch.testing.assert_close(batch_attention(q, k, v, 3, 0.3), masked(q, k, v, [6, 6, 6], -1))


def test_the_operator_keeps_torchs_rules():
    q, k, v, _ = (x.requires_grad_() for x in row(LENGTHS, 4, 2))
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    torch.library.opcheck(torch.ops.keptset.varlen_attention, (q, k, v, borders, 9, 0.3, -1))


def hidden_of(model: PreTrainedModel, attention: str) -> torch.Tensor:
    model.set_attn_implementation(attention)
    policy = Policy(model.eval(), None)
    prove(policy)
    token_ids = torch.arange(sum(LENGTHS)) % 50
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        return policy.hidden(token_ids, positions, torch.tensor([0, *LENGTHS]).cumsum(0), max(LENGTHS))


def mistral(window: int | None) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=50, num_key_value_heads=2, initializer_range=0.3, sliding_window=window, **sizes
        )
    )


@pytest.mark.parametrize("window", [None, 4])
def test_a_model_gives_with_it_what_it_gives_with_a_mask(window):
    model = mistral(window)
    torch.testing.assert_close(hidden_of(model, VARLEN), hidden_of(model, "sdpa"), atol=2e-5, rtol=1e-4)


def test_windows_change_something():
    assert not torch.allclose(hidden_of(mistral(None), VARLEN), hidden_of(mistral(4), VARLEN), atol=1e-3)


def test_a_model_that_hands_no_borders_down_is_refused():
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    q, k, v, _ = row([4], 2, 2)
    arguments = [x.transpose(0, 1)[None] for x in (q, k, v)]
    with pytest.raises(ValueError, match=r'not told where sequences end.*trainer.attention = "sdpa"'):
        attend(model, *arguments, None)


def test_what_the_kernel_does_not_know_is_refused():
    q, k, v, _ = row([4], 2, 2)
    arguments = [x.transpose(0, 1)[None] for x in (q, k, v)]
    borders = torch.tensor([0, 4]).int()
    with pytest.raises(ValueError, match="asks for softcap in its attention"):
        attend(torch.nn.Linear(1, 1), *arguments, None, cu_seq_lens_q=borders, max_length_q=4, softcap=50.0)


def test_empty_sequences_are_no_spans():
    assert spans(torch.tensor([0, 3, 3, 7])) == [(0, 3), (3, 7)]


@given(st.lists(st.integers(0, 4096), min_size=1, max_size=40), st.sampled_from([torch.int32, torch.int64]))
def test_cudnn_s_offsets_are_elements_before_each_sequence(lengths, kind):
    borders = torch.tensor([0, *lengths]).cumsum(0).to(kind)
    elements = cudnn_ragged.elements_a_token(16, 8, 128)
    offsets = cudnn_ragged.offsets_of(borders, torch.tensor([*elements.values()]))
    wanted = {Name.STATS_OFFSETS: 16, Name.Q_OFFSETS: 2048, Name.K_OFFSETS: 1024}
    assert elements == wanted
    for factor, one in zip(wanted.values(), offsets, strict=True):
        assert one.dtype == torch.int64
        assert one.is_contiguous()
        assert (one.data_ptr() - offsets[0].data_ptr()) % 128 == 0
        assert torch.equal(one, borders.long() * factor)
    assert cudnn_ragged.elements_a_token(4, 4, 64) == {Name.STATS_OFFSETS: 4, Name.Q_OFFSETS: 256}
