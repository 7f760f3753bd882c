"""Who wants a set, while requests join, leave and move; and who may ask."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata

from keptset_inference.capture import padding
from keptset_inference.capture.bounds import widest_set
from keptset_inference.capture.cut import NO_SET
from keptset_inference.capture.flag import FLAG, is_marked, mark
from keptset_inference.capture.native_rows import NativeRows
from keptset_inference.capture.padding import KEY
from keptset_inference.capture.rows import KeptRows

from .engine_config import vllm_config


def marked(**params) -> SamplingParams:
    wanted = SamplingParams(**{"logprobs": 0} | params)
    mark(wanted)
    return wanted


def rows(vocabulary: int = 1000, max_num_seqs: int = 32) -> KeptRows:
    return KeptRows(vllm_config(vocabulary, max_num_seqs), torch.device("cpu"), False)


def random_step(chance: random.Random, slots: list) -> tuple[list, BatchUpdate]:
    """One step as vLLM makes it: removed, added (into holes first), condensed, swapped."""
    holes = sorted(chance.sample(range(len(slots)), chance.randint(0, len(slots) // 2)))
    slots, removed = list(slots), list(holes)
    for hole in holes:
        slots[hole] = None
    added, moved = [], []
    for _ in range(chance.randint(0, min(5, 32 - sum(slot is not None for slot in slots)))):
        params = marked(top_k=chance.randint(1, 500)) if chance.random() < 0.6 else SamplingParams(top_k=9)
        row = holes.pop(0) if holes else len(slots)
        if row == len(slots):
            slots.append(params)
        else:
            slots[row] = params
            removed.remove(row)
        added.append((row, params, None, []))
    while None in slots:
        while slots and slots[-1] is None:
            slots.pop()
        if None in slots:
            hole = slots.index(None)
            slots[hole] = slots.pop()
            moved.append((len(slots), hole, MoveDirectionality.UNIDIRECTIONAL))
    if len(slots) > 1 and chance.random() < 0.3:
        a, b = chance.sample(range(len(slots)), 2)
        slots[a], slots[b] = slots[b], slots[a]
        moved.append((a, b, MoveDirectionality.SWAP))
    return slots, BatchUpdate(len(slots), removed, added, moved)


@pytest.mark.parametrize("seed", range(4))
def test_rows_follow_the_batch(seed):
    # vllm#43894: a request leaves mid-batch: its mask on the next one
    chance, batch, kept = random.Random(seed), [], rows()
    for _ in range(300):
        batch, update = random_step(chance, batch)
        kept.update_state(update)
        expected = [params.top_k if is_marked(params) else 0 for params in batch]
        assert kept.top_k[: len(batch)].tolist() == expected
        assert not kept.top_k[len(batch) :].any()
        assert kept.count == np.count_nonzero(expected)
        assert kept.widest == max(expected, default=0)
        assert kept.others_top_k == (0 in expected)


def test_a_batch_larger_than_announced_is_followed_too():
    kept = rows(max_num_seqs=1)
    kept.update_state(BatchUpdate(6, [], [(5, marked(top_k=3), None, [])], []))
    assert kept.top_k.tolist() == [0, 0, 0, 0, 0, 3, 0]


def test_only_marked_rows_are_cut_and_only_while_a_sampler_reads_them():
    kept = rows(vocabulary=6)
    added = [(0, SamplingParams(top_k=2), None, []), (1, marked(top_k=2), None, [])]
    kept.update_state(BatchUpdate(2, [], added, []))
    logits = torch.zeros(2, 6)
    assert torch.equal(kept.apply(logits.clone()), logits), "not armed"
    kept.armed = True
    assert torch.isfinite(kept.apply(logits.clone())).sum(1).tolist() == [6, 2]
    assert kept.columns.tolist() == [[NO_SET] * 3, [2, 0, 1]]


def test_vllm_cuts_the_other_rows_and_only_those():
    kept = rows(vocabulary=100)
    step = SimpleNamespace(top_k=torch.tensor([7, 5, 100]).int(), top_p=torch.tensor([0.9, 0.8, 1.0]))
    requests = [marked(top_k=7, top_p=0.9), SamplingParams(top_k=5, top_p=0.8), SamplingParams()]
    for others, top_k, top_p in (
        ([], None, None),
        ([SamplingParams(temperature=0.0)], None, None),
        (requests[1:], [100, 5, 100], [1.0, 0.8, 1.0]),
    ):
        batch = [requests[0], *others]
        kept.update_state(BatchUpdate(3, [1, 2], [(i, p, None, []) for i, p in enumerate(batch)], []))
        assert torch.isclose(kept.top_p[:1], torch.tensor([0.9])).all()
        left = kept.without_cuts(metadata(top_k=step.top_k, top_p=step.top_p))
        assert top_k is None or left.top_p.tolist() == torch.tensor(top_p).tolist()
        assert (None if left.top_k is None else left.top_k.tolist()) == top_k
        assert (left.top_p is None) == (top_p is None)
    assert kept.without_cuts(metadata()).top_k is None


def metadata(**fields) -> SamplingMetadata:
    names = [field.name for field in dataclasses.fields(SamplingMetadata)]
    return SamplingMetadata(**dict.fromkeys(names) | fields)


def test_ids_that_the_tokenizer_does_not_have_are_cut():
    config = vllm_config(1000)
    config.additional_config = {KEY: 3}
    kept = KeptRows(config, torch.device("cpu"), False)
    kept.armed = True
    kept.update_state(
        BatchUpdate(2, [], [(0, marked(top_k=5), None, []), (1, SamplingParams(), None, [])], [])
    )
    logits = torch.arange(2000.0).reshape(2, 1000)
    left = torch.isfinite(kept.apply(logits))
    assert left[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert left[1].all(), "other requests sample as in vLLM"


def test_the_widest_set_is_bounded_by_top_k_allowed_ids_and_vocabulary():
    assert widest_set(SamplingParams(), 261) == 261
    assert widest_set(SamplingParams(top_k=-1), 261) == 261
    assert widest_set(SamplingParams(top_k=400), 261) == 261
    assert widest_set(SamplingParams(top_k=9), 261) == 9
    assert widest_set(SamplingParams(allowed_token_ids=[4, 4, 5]), 261) == 2


def test_a_mark_that_somebody_else_set_is_refused():
    KeptRows.validate_params(marked(top_k=3))
    KeptRows.validate_params(marked(top_k=600))  # more than a small vocabulary has
    KeptRows.validate_params(SamplingParams(top_k=3, extra_args={"other": 1}))
    for forged in (1, True, "", None, "0" * 32):
        with pytest.raises(ValueError, match=r"private.*inference/v1/generate"):
            KeptRows.validate_params(SamplingParams(top_k=3, logprobs=0, extra_args={FLAG: forged}))


@pytest.mark.parametrize("hook", [KeptRows, NativeRows])
@pytest.mark.parametrize(
    "unsound", [{"top_p": 1e-46}, {"top_p": 1e-39}, {"temperature": 0}, {"logprobs": -1}]
)
def test_both_captures_stop_what_the_route_makes_sure_of(hook, unsound):
    with pytest.raises(AssertionError):
        hook.validate_params(marked(**{"top_k": 3} | unsound))


def test_the_mark_survives_what_vllm_does_to_parameters():
    assert is_marked(marked(top_k=3, n=2).clone())
    assert not is_marked(SamplingParams())
    assert not is_marked(None)


@pytest.mark.parametrize(("highest", "known"), [(8, 9), (9, 10), (40, 10)])
def test_the_config_changes_only_where_there_are_ids_to_mask(monkeypatch, highest, known):
    """Answers carry a hash of it."""
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": highest})
    monkeypatch.setattr(padding, "cached_tokenizer_from_config", lambda config: tokenizer)
    config = vllm_config(10)
    config.additional_config = {"other": 1}
    assert padding.mask_unknown_ids(config) == known == padding.known_ids(config)
    assert config.additional_config == {"other": 1} | ({padding.KEY: known} if known < 10 else {})
    monkeypatch.setattr(padding, "cached_tokenizer_from_config", lambda config: None)
    assert padding.mask_unknown_ids(vllm_config(10)) == 10, "without a tokenizer nothing is known"
