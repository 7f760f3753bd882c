"""Rows: whole sequences, nothing predicted across a border, nothing attended across one."""

import dataclasses
import types
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM

from kept_tokens import KeptTokens, KeptTokensError
from kept_tokens.messages import BatchView, TrainingSample, WeightSpan, encode
from keptset_trainer.micro_batch import moved
from keptset_trainer.model import Policy
from keptset_trainer.packing import UNRECORDED, empty_row, pack


@st.composite
def samples_of_integers(draw: st.DrawFn) -> list[TrainingSample]:
    """Samples whose every array entry tells which sample and token it is of."""
    samples = []
    for index in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 9))
        tokens = np.arange(length) + 100 * index
        mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))])
        has_masks = draw(st.booleans())
        rows = [
            sorted({int(token), *draw(st.lists(st.integers(0, 999), max_size=3))})
            if has_masks and loss
            else []
            for token, loss in zip(tokens, mask, strict=True)
        ]
        samples.append(
            TrainingSample.build(
                token_ids=tokens,
                loss_mask=mask,
                logprobs=np.where(mask, -tokens - 0.5, 0),
                temperatures=tokens + 0.25,
                advantages=tokens + 0.125,
                kept=KeptTokens.from_rows(rows) if has_masks else None,
                must_have_masks=False,
                source="",
                group="",
                sample_id=str(index),
            )
        )
    return samples


@given(samples_of_integers(), st.integers(9, 30))
def test_every_trained_token_is_predicted_once_from_the_token_before_it(samples, row_tokens):
    expected = set()
    for index, sample in enumerate(samples):
        arrays, kept = sample.arrays(), sample.kept()
        for t in range(1, sample.num_tokens):
            if arrays.loss_mask[t]:
                expected.add(
                    (
                        index,
                        int(arrays.token_ids[t - 1]),
                        int(arrays.token_ids[t]),
                        float(arrays.logprobs[t]),
                        float(arrays.temperatures[t]),
                        float(arrays.advantages[t]),
                        tuple(kept.rows()[t]) if kept else (),
                    )
                )
    found = []
    for row in pack(samples, row_tokens):
        assert len(row.token_ids) == len(row.positions) == row.borders[-1] <= row_tokens
        assert row.longest == row.borders.diff().max()
        assert row.has_trained.tolist() == [s in row.sequence for s in range(row.num_sequences)]
        at = row.predicting
        offsets = row.kept.offsets.tolist()
        for n in range(len(row.labels)):
            sequence = int(row.sequence[n])
            assert row.borders[sequence] <= at[n] < row.borders[sequence + 1] - 1
            found.append(
                (
                    int(row.samples[sequence]),
                    int(row.token_ids[at[n]]),
                    int(row.labels[n]),
                    float(row.rollout_logprobs[n]),
                    float(row.temperatures[n]),
                    float(row.advantages[n]),
                    tuple(row.kept.ids[offsets[n] : offsets[n + 1]].tolist()),
                )
            )
    assert sorted(found) == sorted(expected)


@given(samples_of_integers(), st.integers(9, 30), st.data())
def test_every_token_keeps_the_version_that_sampled_it(samples, row_tokens, data):
    told = []
    for sample in samples:
        ends = sorted(data.draw(st.sets(st.integers(1, sample.num_tokens), max_size=3)))
        spans = [WeightSpan(7 + n, *span) for n, span in enumerate(pairwise([0, *ends]))]
        told.append(msgspec.structs.replace(sample, weight_versions=spans))
    for row in pack(told, row_tokens):
        for n, position in enumerate(row.predicting.tolist()):
            sequence = int(row.sequence[n])
            at = position + 1 - int(row.borders[sequence])
            spans = told[int(row.samples[sequence])].weight_versions
            found = [version for version, start, end in spans if start <= at < end]
            assert int(row.versions[n]) == (found or [UNRECORDED])[0]


@given(samples_of_integers(), st.integers(9, 30))
def test_positions_restart_with_every_sequence(samples, row_tokens):
    for row in pack(samples, row_tokens):
        for sequence, sample in enumerate(row.samples.tolist()):
            part = slice(row.borders[sequence], row.borders[sequence + 1])
            assert row.positions[part].tolist() == list(range(samples[sample].num_tokens))
            assert row.token_ids[part].tolist() == samples[sample].arrays().token_ids.tolist()


def packed(policy: Policy, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return policy.hidden(torch.cat(sequences), positions, borders, max(lengths))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_packed_logits_equal_unpacked_ones(tiny_model, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(261, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        logits = packed(Policy(tiny_model, None), sequences) @ tiny_model.lm_head.weight.T
        alone = torch.cat([tiny_model(input_ids=sequence[None]).logits[0] for sequence in sequences])
    # Kernels add in another order at another length, and CPUs differ in that: a few units of float32
    # at the size of the logits. A neighbour that leaks in would show at their full size.
    assert torch.allclose(logits, alone, rtol=0, atol=1e-5 * max(1, float(alone.abs().max())))


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.data())
@settings(max_examples=20, deadline=None)
def test_changing_a_neighbour_changes_nothing(tiny_model, lengths, data):
    changed = data.draw(st.integers(0, len(lengths) - 1))
    sequences = [torch.randint(261, (length,)) for length in lengths]
    others = list(sequences)
    others[changed] = (sequences[changed] + 1 + torch.randint(259, (lengths[changed],))) % 261
    policy = Policy(tiny_model, None)
    with torch.no_grad():
        before, after = packed(policy, sequences).split(lengths), packed(policy, others).split(lengths)
    for index in range(len(lengths)):
        assert torch.equal(before[index], after[index]) == (index != changed)


def test_sliding_windows_end_at_borders_too():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        attn_implementation="sdpa",
        initializer_range=0.3,
    )
    model = Gemma2ForCausalLM(config).eval()
    sequences = [torch.randint(50, (length,)) for length in (3, 9, 1, 6)]
    with torch.no_grad():
        together = packed(Policy(model, None), sequences).split([3, 9, 1, 6])
        for sequence, hidden in zip(sequences, together, strict=True):
            alone = model.model(input_ids=sequence[None], use_cache=False).last_hidden_state[0]
            assert torch.allclose(hidden, alone, atol=1e-5)


@given(samples_of_integers(), st.integers(9, 30))
@settings(max_examples=20)
def test_a_row_is_moved_in_one_piece(samples, row_tokens):
    """To the device of shapes alone, whose bytes nobody sees; and, by hand, to bytes that are seen."""
    for row in [*pack(samples, row_tokens), empty_row()]:
        elsewhere = row.to(torch.device("meta"))
        for field in dataclasses.fields(row):
            here, there = getattr(row, field.name), getattr(elsewhere, field.name)
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (here, there)), strict=True):
                if isinstance(a, torch.Tensor):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype), field.name
                    assert b.device.type == "meta"
                else:
                    assert a == b


def test_what_is_moved_stays_what_it_is(monkeypatch):
    tensors = [torch.arange(3), torch.tensor([True]), torch.zeros(0), torch.rand(5), torch.arange(7).int()]
    device = types.SimpleNamespace(type="elsewhere")  # the CPU under another name
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    for before, after in zip(tensors, moved(tensors, device), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_a_rank_decodes_the_samples_of_its_rows_alone(make_batch):
    """The others could be anything: here they are samples up to their last field."""
    batch = make_batch(1, samples=9)
    whole = pack(batch.samples, 64, 1, 2)
    own = set(whole.indices)
    assert 0 < len(own) < 9
    encoded = [
        encode(sample)
        if index in own
        else msgspec.msgpack.encode([*msgspec.to_builtins(sample, builtin_types=(bytes,))[:-1], "heavy"])
        for index, sample in enumerate(batch.samples)
    ]
    data = msgspec.msgpack.encode([1, [msgspec.Raw(one) for one in encoded], batch.content_hash])
    view = BatchView(data)
    rows = pack(view.samples, 64, 1, 2)
    assert rows.loss_tokens() == whole.loss_tokens() == sum(len(row.labels) for row in whole)
    for row, expected in zip(rows, whole, strict=True):
        assert torch.equal(row.token_ids, expected.token_ids)
        assert torch.equal(row.kept.ids, expected.kept.ids)
    with pytest.raises(KeptTokensError, match="cannot be decoded"):
        list(pack(view.samples, 64, 0, 2))
