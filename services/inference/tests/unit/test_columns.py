"""What the sampler appends and what the scheduler takes off again."""

import numpy as np
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists

from keptset_inference.capture.columns import split_columns
from keptset_inference.capture.cut import NO_SET, PAD
from keptset_inference.capture.scheduler import move_columns


def lists(columns: np.ndarray, logprobs: int = 0) -> LogprobsLists:
    """What comes from the device: the ids of `logprobs` + 1 logprobs, then the columns."""
    rows = len(columns)
    ids = np.concatenate((np.full((rows, 1 + logprobs), 7, np.int32), columns), axis=1)
    return LogprobsLists(ids, np.zeros((rows, 1 + logprobs), np.float32), np.zeros(rows, np.int32))


def test_nothing_is_split_off_where_nothing_was_appended():
    plain = lists(np.zeros((2, 0), np.int32), logprobs=3)
    assert split_columns(plain, np.array([1, 2])) == (plain, None, [])


def test_sets_come_back_row_by_row_and_the_logprobs_as_they_were():
    columns = np.array([[2, 3, 9, PAD], [NO_SET, -1, -1, -1], [3, 0, 4, 5]], np.int32)
    plain, masks, problems = split_columns(lists(columns, logprobs=2), np.array([9, 1, 0]))
    assert problems == []
    assert plain.logprob_token_ids.tolist() == [[7, 7, 7]] * 3
    assert masks.offsets.tolist() == [0, 2, 2, 5]
    assert masks.token_ids.tolist() == [3, 9, 0, 4, 5]
    assert masks.token_ids.dtype == np.int32


def test_a_set_that_is_too_large_or_lacks_its_token_is_dropped_and_reported():
    columns = np.array([[4, 1, 2, 3], [2, 1, 2, PAD], [1, 5, PAD, PAD]], np.int32)
    _, masks, problems = split_columns(lists(columns), np.array([1, 3, 5]))
    assert masks.offsets.tolist() == [0, 0, 0, 1], "the row without a fault keeps its set"
    assert len(problems) == 2
    assert "row 0" in problems[0]
    assert "row 1" in problems[1]


def test_padding_is_never_taken_for_the_sampled_id():
    _, masks, problems = split_columns(lists(np.array([[1, 4, PAD]], np.int32)), np.array([PAD]))
    assert len(problems) == 1
    assert masks.token_ids.size == 0


def test_a_row_that_holds_no_numbers_is_reported():
    _, masks, problems = split_columns(lists(np.array([[PAD, 1, 2]], np.int32)), np.array([1]))
    assert len(problems) == 1
    assert masks.token_ids.size == 0


def test_a_row_in_the_middle_of_its_prompt_sampled_nothing_and_is_no_fault():
    assert split_columns(lists(np.array([[1, 2, PAD]], np.int32)), np.array([-1]))[2] == []
    output = ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1})
    output.sampled_token_ids = [[], [4]]
    output.logprobs = lists(np.array([[1, 2, PAD], [2, 3, 4]], np.int32))
    move_columns(output)
    assert output.logprobs.logprob_token_ids.shape == (2, 1)
    second = output.sampling_masks.slice_request(1, 1)
    assert isinstance(second, SamplingMaskLists)
    assert second.token_ids.tolist() == [3, 4]


def test_a_step_without_logprobs_has_no_sets():
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    output.sampled_token_ids = [[4]]
    move_columns(output)
    assert output.sampling_masks is None
