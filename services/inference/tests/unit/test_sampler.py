"""vLLM's own sampler with our capture in it, on hand-made logits: no engine, but nothing else is a
stand-in.
"""

import dataclasses

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from keptset_inference.capture.columns import split_columns
from keptset_inference.capture.cut import PAD
from keptset_inference.capture.padding import KEY
from keptset_inference.capture.proven import Proof
from keptset_inference.capture.rows import KeptRows
from keptset_inference.capture.v1 import CaptureSampler
from keptset_inference.proof import PROBES

from .engine_config import vllm_config
from .test_rows import marked

VOCABULARY = 40


def metadata(requests: list[SamplingParams], seed: int | None = None) -> SamplingMetadata:
    """As the model runner builds it for one step."""
    kept = KeptRows(vllm_config(VOCABULARY), torch.device("cpu"), False)
    kept.update_state(BatchUpdate(len(requests), [], [(i, p, None, []) for i, p in enumerate(requests)], []))
    greedy = [p.temperature < 1e-5 for p in requests]
    top_k = torch.tensor(
        [p.top_k if 0 < p.top_k < VOCABULARY else VOCABULARY for p in requests], dtype=torch.int32
    )
    fields = {field.name: None for field in dataclasses.fields(SamplingMetadata)}
    fields |= {
        "temperature": torch.tensor([p.temperature for p in requests]),
        "all_greedy": all(greedy),
        "all_random": not any(greedy),
        "top_p": torch.tensor([p.top_p for p in requests]),
        "top_k": top_k,
        "generators": {}
        if seed is None
        else {i: torch.Generator().manual_seed(seed + i) for i in range(len(requests))},
        "max_num_logprobs": max(p.logprobs or 0 for p in requests),
        "no_penalties": True,
        "output_token_ids": [],
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors([kept]),
    }
    return SamplingMetadata(**fields)


def sample(sampler: Sampler, logits: torch.Tensor, requests: list[SamplingParams], seed: int | None = None):
    output = sampler.forward(logits.clone(), metadata(requests, seed))
    return output.sampled_token_ids[:, 0].tolist(), output.logprobs_tensors.tolists()


def capture() -> CaptureSampler:
    return CaptureSampler("processed_logprobs")


MIXED = [
    marked(top_k=5, top_p=0.9, temperature=0.7),
    SamplingParams(top_k=5, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=0),
    marked(top_k=3),
    SamplingParams(logprobs=2),
]


def test_each_set_is_what_its_token_was_sampled_from():
    torch.manual_seed(0)
    logits = torch.randn(len(MIXED), VOCABULARY).mul(3).round()  # full of ties
    for _ in range(50):
        sampled, lists = sample(capture(), logits, MIXED)
        plain, masks, problems = split_columns(lists, np.array(sampled))
        assert problems == []
        assert plain.logprob_token_ids.shape == plain.logprobs.shape
        sizes = np.diff(masks.offsets)
        assert (sizes > 0).tolist() == [True, False, False, True, False]
        assert sizes[3] == 3, "exactly top_k, whatever is tied"
        for row in (0, 3):
            ids = masks.token_ids[masks.offsets[row] : masks.offsets[row + 1]]
            x = logits[row].double() / MIXED[row].temperature
            expected = x[sampled[row]] - x[torch.tensor(ids.astype(np.int64))].logsumexp(0)
            assert sampled[row] in ids
            assert abs(plain.logprobs[row, 0] - expected) < 1e-5


def test_rows_without_a_set_sample_as_without_capture():
    torch.manual_seed(1)
    logits = torch.randn(len(MIXED), VOCABULARY)
    ours, lists = sample(capture(), logits, MIXED, seed=5)
    stock, stock_lists = sample(Sampler("processed_logprobs"), logits, MIXED, seed=5)
    unmarked = [1, 2, 4]
    assert [ours[i] for i in unmarked] == [stock[i] for i in unmarked]
    assert np.array_equal(lists.logprobs[unmarked], stock_lists.logprobs[unmarked])


def test_the_proof_compares_what_was_recorded_with_what_was_sampled_from():
    sampler = capture()
    sampler.proof = Proof()
    sample(sampler, torch.randn(len(MIXED), VOCABULARY), MIXED)
    assert sampler.proof == Proof(right=2)
    logprobs = torch.tensor([[0.0, -torch.inf, -1.0]])
    for columns, right in (([2, 0, 2], 1), ([1, 0, 2], 0), ([2, 0, 1], 0), ([PAD, 0, 2], 0)):
        proof = Proof()
        proof.compare(logprobs, torch.tensor([columns]))
        assert (proof.right, proof.wrong) == (right, 1 - right)
    proof.compare(logprobs, None)
    assert proof.wrong == 2


def test_a_step_without_marked_rows_carries_no_columns():
    # FastDeploy#7460: a step that sends no mask on a side channel: the scheduler waits for ever
    requests = [SamplingParams(top_k=5, logprobs=1), SamplingParams(logprobs=0)]
    _, lists = sample(capture(), torch.randn(2, VOCABULARY), requests)
    assert lists.logprob_token_ids.shape == lists.logprobs.shape


def test_a_failing_step_leaves_nothing_armed():
    sampler, requests = capture(), [marked(top_k=2)]
    step = metadata(requests)
    with pytest.raises(RuntimeError):
        sampler.forward(torch.zeros(3), step)
    assert sampler.rows is None
    assert not step.logitsprocs.argmax_invariant[0].armed


def test_sets_are_sampled_uniformly_among_equals():
    torch.manual_seed(2)
    rows = 4000
    sampled, _lists = sample(capture(), torch.zeros(rows, VOCABULARY), [marked(top_k=4)] * rows)
    assert set(sampled) == {0, 1, 2, 3}
    counts = np.bincount(sampled, minlength=4)
    assert ((counts - rows / 4) ** 2 / (rows / 4)).sum() < 21.1  # chi-square, 3 degrees, p = 1e-4


def test_min_p_does_not_look_at_ids_that_are_masked_out():
    """The tokenizer has 30 of 40 ids; the most likely id of all is none of them."""
    config = vllm_config(VOCABULARY)
    config.additional_config = {KEY: 30}
    requests = [marked(min_p=0.5, top_k=20), marked(min_p=0.5, top_k=20), SamplingParams(min_p=0.5, top_k=20)]
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 35] = 5.0
    logits[:, 7], logits[:, 9] = 1.0, 0.9
    step, device = metadata(requests), torch.device("cpu")
    update = BatchUpdate(3, [], [(i, p, None, []) for i, p in enumerate(requests)], [])
    kept, minimum = KeptRows(config, device, False), MinPLogitsProcessor(config, device, False)
    kept.update_state(update)
    minimum.update_state(update)
    output = capture().forward(
        logits, dataclasses.replace(step, logitsprocs=LogitsProcessors([minimum, kept]))
    )
    sampled = output.sampled_token_ids[:, 0].numpy()
    _, masks, problems = split_columns(output.logprobs_tensors.tolists(), sampled)
    assert not problems
    assert np.split(masks.token_ids, masks.offsets[1:-1])[0].tolist() == [7, 9]
    assert np.diff(masks.offsets).tolist() == [2, 2, 0]
    assert sampled[2] == 35, "who wants no sets samples as in vLLM"


@pytest.mark.parametrize("after", [False, True])
def test_the_proof_finds_a_min_p_that_acts_after_the_cut(after):
    config, device = vllm_config(VOCABULARY), torch.device("cpu")
    requests = [marked(**PROBES["v1"][1])] * 2
    update = BatchUpdate(2, [], [(i, p, None, []) for i, p in enumerate(requests)], [])
    processors = [MinPLogitsProcessor(config, device, False), KeptRows(config, device, False)]
    for one in processors:
        one.update_state(update)
    order = LogitsProcessors(reversed(processors) if after else processors)
    sampler = capture()
    sampler.proof = Proof()
    sampler.forward(torch.randn(2, VOCABULARY), dataclasses.replace(metadata(requests), logitsprocs=order))
    assert sampler.proof == (Proof(wrong=2) if after else Proof(right=2))
