"""What the answer to a probe must be for a server to start."""

import math

import pytest
from vllm.v1.outputs import SamplingMaskLists

from keptset_inference.proof import PROBES, are_two_sets

from .test_packed import pack, step

TWO, BEST = PROBES["v1"]
HALF = -math.log(2)


def answer(rows: list[list[int]], logprobs: list[float]) -> list[SamplingMaskLists]:
    """The chunks of a request, a token each."""
    chunks = []
    for row, value in zip(rows, logprobs, strict=True):
        output = step([row], [value])
        assert pack(output)
        chunks.append(SamplingMaskLists(output.sampling_masks.token_ids))
    return chunks


@pytest.mark.parametrize(
    ("sampling", "rows", "logprobs", "right"),
    [
        (TWO, [[3, 9], [1, 2]], [-0.1, -2.0], True),
        (TWO, [[3, 9]], [-0.1], False),
        (TWO, [[3, 9], [1]], [-0.1, 0.0], False),
        (TWO, [[3, 9], [1, 2, 4]], [-0.1, -2.0], False),
        (TWO, [[3, 9], []], [-0.1, -2.0], False),
        (BEST, [[3], [9]], [0.0, 0.0], True),
        (BEST, [[3], [2, 9]], [0.0, HALF], True),  # tied in a model of few bits: nothing is wrong
        (BEST, [[3], [2, 9]], [0.0, HALF - 0.01], False),  # min_p took nothing away
        (BEST, [[3], [2, 9]], [0.0, 0.0], False),  # it did, after the set was written down
        (BEST, [[3], []], [0.0, 0.0], False),
    ],
)
def test_a_probe_wants_two_sets_that_its_parameters_allow(sampling, rows, logprobs, right):
    assert are_two_sets(answer(rows, logprobs), "v1", sampling, packed=True) is right


def test_vllms_own_cut_may_leave_more_that_are_tied_and_drafts_send_two_sets_at_once():
    ties = answer([[3, 9, 11], [1, 2]], [-0.1, -2.0])
    assert are_two_sets(ties, "native", TWO, packed=True)
    together = step([[3, 9], [1, 2]], [0.0, 0.0]).sampling_masks
    assert are_two_sets([together], "native", TWO, packed=False)
    assert not are_two_sets([], "native", TWO, packed=False)


def test_drafts_allow_no_probe_with_min_p():
    assert not any("min_p" in probe for probe in PROBES["native"])
