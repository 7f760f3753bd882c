"""What our scheduler makes of a step, over a vLLM that cuts each request's part as its own does."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from keptset_inference.capture.carried import spread
from keptset_inference.capture.cut import NO_SET, PAD
from keptset_inference.capture.packed import unpack_rows
from keptset_inference.capture.scheduler import _WithKeptSets

from .test_packed import step
from .test_rows import marked


class Vllms:
    """The part of vLLM's scheduler that hands out logprobs and masks."""

    def __init__(self, requests: dict[str, SamplingParams], drafts: object = None):
        self.vllm_config = SimpleNamespace(speculative_config=drafts)
        self.requests = {name: SimpleNamespace(sampling_params=params) for name, params in requests.items()}

    def update_from_output(self, scheduled, output):
        assert self.return_sampling_mask
        made = []
        for place, name in enumerate(self.requests):
            row = output.req_id_to_index.get(name, place)
            masks, logprobs = output.sampling_masks, output.logprobs
            if not output.sampled_token_ids[row]:
                continue  # in the middle of its prompt
            made.append(
                EngineCoreOutput(
                    name,
                    output.sampled_token_ids[row],
                    new_logprobs=None if logprobs is None else logprobs.slice_request(row, 1),
                    new_sampling_mask=None if masks is None else masks.slice_request(row, 1),
                )
            )
        return {0: EngineCoreOutputs(outputs=made)}


class Scheduler(_WithKeptSets, Vllms):
    """As `KeptScheduler`, over this vLLM."""


def update(scheduler: Scheduler, output) -> list[EngineCoreOutput]:
    scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduler.requests, 1))
    return scheduler.update_from_output(scheduled, output)[0].outputs


def requests() -> dict[str, SamplingParams]:
    several = marked(top_k=3, detokenize=False)
    several.logprobs = 2
    return {"packed": marked(top_k=3, detokenize=False), "plain": SamplingParams(), "several": several}


def by_columns():
    """A step of the V1 runner: the sets ride behind the ids of two candidates."""
    output = step([[3, 17], [], [5]], [-0.25, -1.0, -2.0], columns=3)
    columns = np.array([[2, 3, 17, PAD], [NO_SET, PAD, PAD, PAD], [1, 5, PAD, PAD]], np.int32)
    ids = np.concatenate((output.logprobs.logprob_token_ids, columns), axis=1)
    output.logprobs = output.logprobs._replace(logprob_token_ids=ids)
    output.sampling_masks, output.sampled_token_ids = None, [[17], [9], [5]]
    return output


def by_masks():
    """A step of the V2 runner: vLLM's own masks."""
    output = step([[3, 17], [], [5]], [-0.25, -1.0, -2.0], columns=3)
    output.sampled_token_ids = [[17], [9], [5]]
    return output


@pytest.mark.parametrize("output_of", [by_columns, by_masks])
def test_each_request_gets_what_it_asked_for(output_of):
    packed, plain, several = update(Scheduler(requests()), output_of())
    assert packed.new_logprobs is None
    ranks, logprobs, kept = unpack_rows([packed.new_sampling_mask])
    assert (ranks.tolist(), logprobs.tolist(), kept.rows()) == ([0], [-0.25], [[3, 17]])
    assert plain.new_sampling_mask is None
    assert plain.new_logprobs.logprob_token_ids.shape == (1, 3)
    assert several.new_sampling_mask.token_ids.tolist() == [5]
    assert several.new_logprobs.logprobs.tolist() == [[-2.0] * 3]


@pytest.mark.parametrize("output_of", [by_columns, by_masks])
def test_the_sets_of_several_requests_travel_together(output_of):
    wanted = requests()
    wanted["plain"] = marked(top_k=3, detokenize=False)
    output = output_of()
    if output_of is by_columns:
        output.logprobs.logprob_token_ids[1, 3:] = [1, 9, PAD, PAD]
    outputs = update(Scheduler(wanted), output)
    carrier = outputs[0].new_sampling_mask
    assert carrier.cu_num_generated_tokens == [0, 1]
    assert outputs[1].new_sampling_mask is None
    assert outputs[2].new_sampling_mask.token_ids.tolist() == [5], "with other logprobs: alone"
    spread(outputs)
    kept = unpack_rows([out.new_sampling_mask for out in outputs[:2]])[2].rows()
    assert kept == [[3, 17], [9] if output_of is by_columns else []]


def test_a_step_of_nothing_but_packed_sets_is_not_cut_up():
    output = step([[3, 17], [4], [5, 9]], [-0.25, -1.0, -2.0])
    output.sampled_token_ids, output.req_id_to_index = [[17], [], [5]], {"a": 2, "b": 1, "c": 0}
    outputs = update(Scheduler({name: marked(top_k=3, detokenize=False) for name in "abc"}), output)
    assert [out.request_id for out in outputs] == ["a", "c"], "b is in the middle of its prompt"
    assert all(out.new_logprobs is None for out in outputs)
    spread(outputs)
    ranks, logprobs, kept = unpack_rows([out.new_sampling_mask for out in outputs])
    assert (ranks.tolist(), logprobs.tolist()) == ([2, 0], [-2.0, -0.25])
    assert kept.rows() == [[5, 9], [3, 17]]


def test_a_step_in_which_nobody_sampled_has_no_sets():
    output = step([[3, 17]], [-0.25])
    output.sampled_token_ids = [[]]
    assert update(Scheduler({"a": marked(top_k=3, detokenize=False)}), output) == []


def test_with_drafts_nothing_is_packed():
    """Also not in a step that happens to have one token of each request."""
    packed, plain, _ = update(Scheduler(requests(), drafts=object()), by_masks())
    assert packed.new_sampling_mask.token_ids.tolist() == [3, 17]
    assert isinstance(packed.new_logprobs, LogprobsLists)
    assert plain.new_sampling_mask is None


def test_a_step_without_logprobs_passes_through():
    output = by_masks()
    output.logprobs = output.sampling_masks = None
    assert all(made.new_sampling_mask is None for made in update(Scheduler(requests()), output))


def test_masks_without_logprobs_are_no_sets():
    """Requests with sets always have logprobs."""
    output = by_masks()
    output.logprobs = None
    (packed, *_) = update(Scheduler(requests()), output)
    assert isinstance(packed.new_sampling_mask, SamplingMaskLists)
    assert packed.new_logprobs is None
