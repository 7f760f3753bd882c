"""The sets of a step in one array of a message, and each request's again behind it."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from keptset_inference.capture import csr
from keptset_inference.capture.carried import carry, joined, rows_of, spread


def step(rows: list[list[int] | None]) -> list[EngineCoreOutput]:
    """An output a request, with a set or without."""
    return [
        EngineCoreOutput(
            str(number),
            [7],
            new_sampling_mask=None if row is None else SamplingMaskLists(np.array(row, np.int32)),
        )
        for number, row in enumerate(rows)
    ]


def put_together(outputs: list[EngineCoreOutput], places) -> None:
    carry(outputs, places, joined([outputs[place].new_sampling_mask.token_ids for place in places]))


def sets_of(outputs: list[EngineCoreOutput]) -> list[list[int] | None]:
    assert all(out.new_sampling_mask is None or out.new_sampling_mask.offsets is None for out in outputs)
    return [
        None if out.new_sampling_mask is None else out.new_sampling_mask.token_ids.tolist() for out in outputs
    ]


def sent(outputs: list[EngineCoreOutput]) -> tuple[list[EngineCoreOutput], int]:
    """What the API process receives, and of how many parts the message was."""
    parts = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    received = MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in parts])
    return received.outputs, len(parts)


@given(st.lists(st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=90), min_size=1, max_size=12))
def test_what_is_carried_arrives(rows):
    outputs = step(rows)
    places = [place for place, row in enumerate(rows) if row is not None]
    if places:
        put_together(outputs, places)
    received, _ = sent(outputs)
    spread(received)
    assert sets_of(received) == rows


def test_many_sets_are_few_parts_of_a_message():
    rows = [list(range(100 + i)) for i in range(50)]
    assert sent(step(rows))[1] > 50
    outputs = step(rows)
    put_together(outputs, range(50))
    assert sent(outputs)[1] <= 3


def test_sets_that_travel_alone_stay_beside_those_that_are_carried():
    outputs = step([[1, 2], None, [3], [4, 5, 6]])
    put_together(outputs, [2, 3])
    spread(outputs)
    assert sets_of(outputs) == [[1, 2], None, [3], [4, 5, 6]]


def test_a_set_does_not_keep_the_whole_step_alive():
    outputs = step([[1, 2], [3]])
    put_together(outputs, [0, 1])
    spread(outputs)
    assert all(out.new_sampling_mask.token_ids.base is None for out in outputs)


def test_several_tokens_of_a_step_are_no_carrier():
    outputs = step([[1, 2, 3]])
    mask = SamplingMaskLists(np.array([1, 2, 3], np.int32), np.array([0, 1, 3]))
    outputs[0].new_sampling_mask = mask
    spread(outputs)
    assert outputs[0].new_sampling_mask is mask


@pytest.fixture
def spreading():
    """The client of this process, and as it was afterwards."""
    before = AsyncMPClient.get_output_async
    csr.spread_steps()
    csr.spread_steps()
    yield
    AsyncMPClient.get_output_async = before


def test_the_api_process_sees_each_request_with_its_set(spreading):
    outputs = step([[1, 2], [3]])
    put_together(outputs, [0, 1])
    client = SimpleNamespace(_ensure_output_queue_task=lambda: None, outputs_queue=asyncio.Queue())
    client.outputs_queue.put_nowait(EngineCoreOutputs(outputs=outputs))
    received = asyncio.run(AsyncMPClient.get_output_async(client))
    assert sets_of(received.outputs) == [[1, 2], [3]]


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6).flatmap(
        lambda rows: st.tuples(st.just(rows), st.permutations(range(len(rows))), st.integers(0, len(rows)))
    )
)
def test_rows_are_taken_in_any_order(drawn):
    rows, order, count = drawn
    whole = joined([np.array(row, np.int32) for row in rows])
    for wanted in (order[:count] or order, range(max(count, 1))):
        part = rows_of(whole, wanted)
        got = [part.token_ids[a:b].tolist() for a, b in zip(part.offsets[:-1], part.offsets[1:], strict=True)]
        assert got == [rows[row] for row in wanted]
