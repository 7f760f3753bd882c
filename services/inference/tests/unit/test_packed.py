"""One array a token from the scheduler to the API: what goes in comes out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.outputs import CompletionOutput, SamplingMask
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists

from kept_tokens import KeptTokensError
from keptset_inference.capture.packed import can_pack, pack_rows, unpack_rows, without_head
from keptset_inference.capture.scheduler import pack
from keptset_inference.errors import RequestError
from keptset_inference.generate.completion import completion
from keptset_inference.generate.logprobs import LogprobRows
from keptset_inference.generate.sampling import Sampling

from .test_rows import marked


def step(rows: list[list[int]], values: list[float], columns: int = 1) -> ModelRunnerOutput:
    """What the runner says of a step: one sampled token, and its set, a row."""
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    ids = np.full((len(rows), columns), 7, np.int32)
    logprobs = np.tile(np.array(values, np.float32)[:, None], columns)
    output.logprobs = LogprobsLists(ids, logprobs, np.arange(len(rows)))
    offsets = np.cumsum([0, *map(len, rows)])
    output.sampling_masks = SamplingMaskLists(np.array([i for row in rows for i in row], np.int32), offsets)
    return output


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=6),
            st.floats(max_value=0, width=32, allow_infinity=False),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_packed_comes_out(tokens):
    rows, values = [sorted(row) for row, _ in tokens], [value for _, value in tokens]
    output = step(rows, values, columns=2)
    assert pack(output)
    chunks = [output.sampling_masks.slice_request(row, 1) for row in range(len(rows))]
    ranks, logprobs, kept = unpack_rows(chunks)
    assert ranks.tolist() == list(range(len(rows)))
    assert logprobs.tobytes() == np.array(values, np.float32).tobytes()
    assert kept.rows() == rows
    assert [without_head(chunk).token_ids.tolist() for chunk in chunks] == rows


def test_a_row_that_may_have_several_tokens_is_not_packed():
    for name in ("logprobs", "sampling_masks"):
        output = step([[1], [2]], [-1.0, -1.0])
        setattr(output, name, getattr(output, name)._replace(cu_num_generated_tokens=[0, 1, 2]))
        assert not pack(output)
    for name in ("logprobs", "sampling_masks"):
        output = step([[1]], [-1.0])
        setattr(output, name, None)
        assert not pack(output)


def test_only_requests_that_need_no_more_are_packed():
    assert can_pack(marked(top_k=3, detokenize=False))
    assert not can_pack(marked(top_k=3, stop=["x"]))
    assert not can_pack(SamplingParams(top_k=3, logprobs=0, detokenize=False))
    assert not can_pack(None)
    more = marked(top_k=3, detokenize=False)
    more.logprobs = 2
    assert not can_pack(more)


def answered(chunks: list[SamplingMaskLists], tokens: list[int], logprobs=None):
    params = marked(top_k=3, detokenize=False)
    rows = LogprobRows() if logprobs is None else logprobs
    output = CompletionOutput(0, "", tokens, None, rows, "length", sampling_mask=SamplingMask(chunks))
    return completion(output, Sampling(params, True, 0), 100)


def chunks(rows: list[list[int]], values: list[float]) -> list[SamplingMaskLists]:
    output = step(rows, values)
    masks = pack_rows(output.logprobs, output.sampling_masks)
    return [masks.slice_request(row, 1) for row in range(len(rows))]


def test_an_answer_is_made_of_packed_tokens():
    choice = answered(chunks([[3, 17], [5]], [-0.25, 0.0]), [17, 5])
    assert choice.kept.rows() == [[3, 17], [5]]
    assert choice.logprobs.token_ids.tolist() == [[17], [5]]
    assert choice.logprobs.logprobs.tolist() == [[-0.25], [0.0]]
    assert choice.logprobs.ranks.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("rows", "values", "says"),
    [
        ([[3, 17], []], [-0.25, 0.0], "token 1 has no kept set"),
        ([[3, 17], [6]], [-0.25, 0.0], "kept sets"),
        ([[3, 17], [5]], [-0.25, float("nan")], "logprob of token 1"),
        ([[3, 17], [5]], [0.5, 0.0], "logprob of token 0"),
        ([[3, 17]], [0.0], "kept sets"),
    ],
)
def test_what_is_wrong_fails_the_request(rows, values, says):
    with pytest.raises(RequestError, match=says) as failed:
        answered(chunks(rows, values), [17, 5])
    assert failed.value.status == 500


def test_sets_without_their_logprobs_fail_the_request():
    plain = [SamplingMaskLists(np.array(row, np.int32)) for row in ([3, 17], [5])]
    with pytest.raises(RequestError):
        answered(plain, [17, 5])
    plain = [SamplingMaskLists(np.array(row, np.int32)) for row in ([3, 17, 18], [4, 5, 6])]
    with pytest.raises(RequestError):
        answered(plain, [17, 5])
    with pytest.raises(KeptTokensError):
        unpack_rows([SamplingMaskLists(np.array([4], np.int32))])
