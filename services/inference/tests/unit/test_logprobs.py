"""Logprobs as arrays: what vLLM's output processor fills, and the JSON text that is made of it."""

import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import vllm.v1.engine.logprobs as vllm_logprobs
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from keptset_inference.generate.json_answer import NO_EVIDENCE, logprobs_content
from keptset_inference.generate.json_text import items, json_list, rows_of, short_floats
from keptset_inference.generate.logprobs import NO_ID, LogprobRows, keep_logprob_rows


def step(*tokens: int, columns: int = 1) -> LogprobsLists:
    """One or more tokens of one sequence."""
    ids = np.array([[token, *range(50, 49 + columns)] for token in tokens], np.int32)
    return LogprobsLists(ids, -ids / np.float32(8), np.array([token % 7 for token in tokens]))


def filled(*steps: LogprobsLists, candidates: int = 0) -> LogprobRows:
    rows = LogprobRows()
    for one in steps:
        rows.append(one, candidates)
    return rows


@pytest.fixture
def replaced(monkeypatch):
    """As in the process of the API; undone after the test."""
    monkeypatch.setattr(vllm_logprobs, "create_sample_logprobs", vllm_logprobs.create_sample_logprobs)
    name = "_update_sample_logprobs"
    monkeypatch.setattr(LogprobsProcessor, name, getattr(LogprobsProcessor, name))
    keep_logprob_rows()
    keep_logprob_rows()  # a second engine in one process changes nothing


def processor(**params) -> LogprobsProcessor:
    request = SimpleNamespace(sampling_params=SamplingParams(**params))
    return LogprobsProcessor.from_new_request(None, request)


def test_only_flat_logprobs_are_kept_as_rows(replaced):
    ours = processor(logprobs=1, flat_logprobs=True, prompt_logprobs=1)
    theirs = processor(logprobs=1)
    none = processor(flat_logprobs=True)
    for one in (ours, theirs):
        one._update_sample_logprobs(step(5, columns=4))
        one._update_sample_logprobs(step(6, 7, columns=4))
    assert ours.logprobs.arrays().token_ids.tolist() == [[5, 50], [6, 50], [7, 50]]
    assert ours.logprobs.arrays().ranks.tolist() == [5, 6, 0]
    assert isinstance(ours.prompt_logprobs, FlatLogprobs)
    assert [list(position) for position in theirs.logprobs] == [[5, 50], [6, 50], [7, 50]]
    assert none.logprobs is None


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(0, 30))
def test_a_delta_is_the_end_and_deltas_together_are_the_whole(sizes, wanted):
    tokens = iter(range(100))
    rows = filled(*(step(*(next(tokens) for _ in range(size))) for size in sizes))
    total = sum(sizes)
    assert len(rows) == total
    wanted = min(wanted, total)
    tail = rows[-wanted:] if wanted else rows[:0]
    assert len(tail) == wanted
    assert tail.arrays().token_ids[:, 0].tolist() == list(range(total))[total - wanted :]
    merged = rows[:0]
    merged.extend(tail)
    merged.extend(rows)
    assert merged.arrays().token_ids[:, 0].tolist() == [
        *tail.arrays().token_ids[:, 0].tolist(),
        *range(total),
    ]


def test_steps_of_different_width_are_padded_with_no_id():
    arrays = filled(step(3, columns=1), step(4, columns=3), candidates=2).arrays()
    assert arrays.token_ids.tolist() == [[3, NO_ID, NO_ID], [4, 50, 51]]
    content = json.loads(logprobs_content(arrays))
    assert [len(entry["top_logprobs"]) for entry in content] == [0, 2]
    assert [top["rank"] for top in content[1]["top_logprobs"]] == [1, 2]


def test_nothing_is_an_empty_list():
    assert logprobs_content(LogprobRows().arrays()) == b"[]"
    assert items([]) == []


def test_an_unknown_rank_is_null():
    assert json.loads(logprobs_content(filled(step(7)).arrays()))[0]["rank"] is None


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=20))
def test_floats_read_back_as_they_were(values):
    exact = np.array(values, np.float32)
    back = np.array(json.loads(json_list(short_floats(exact))), np.float32)
    expected = np.where(np.isfinite(exact), exact, np.float32(NO_EVIDENCE))
    assert back.tobytes() == (expected + np.float32(0)).tobytes() or (back == expected).all()


def test_a_logprob_takes_few_digits():
    values = -np.random.default_rng(0).exponential(2, 10_000).astype(np.float32)
    texts = [len(text) for text in items(short_floats(values))]
    assert sum(texts) / len(texts) < 11
    assert max(texts) <= 14


def test_rows_are_the_json_of_the_same_objects():
    rows = [{"a": i, "b": None, "c": [i]} for i in range(3)]
    text = rows_of([b'{"a":', items([0, 1, 2]), b',"b":null,"c":', [b"[0]", b"[1]", b"[2]"], b"}"])
    assert text == msgspec.json.encode(rows)
