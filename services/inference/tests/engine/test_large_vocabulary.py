"""The same at 151,936 ids, where sets are a sliver of the vocabulary and top_k = 512 is the limit."""

import os
import signal

import pytest

from ..models.published import directory_name
from ..models.tiny import large_vocabulary_model, save_model, tie_rows
from ..models.tokenizer import byte_ids
from .answers import error_of, of_events
from .cases import Case, mixed_cases
from .conftest import Versions
from .server import keptset_server
from .test_exact_sets import send_all
from .test_ties import TiedReference, check_ties

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def large_versions(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large")
    root = directory / "weights"
    root.mkdir()
    return Versions(save_model(large_vocabulary_model(seed=0), directory / "base"), root)


@pytest.fixture(scope="module")
def large(tmp_path_factory, large_versions):
    with keptset_server(
        tmp_path_factory.mktemp("large-server"),
        large_versions.base,
        weights=large_versions.root,
        kept_tokens_format="both",
        mask_padded_ids=False,  # the tokenizer has 261 ids
        threads=2,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        block_size=32,
        shutdown_timeout=300,  # however slow it is
    ) as server:
        yield server


async def test_mixed_batches(large, large_versions, evidence):
    cases = mixed_cases(seed=7, rounds=2, vocabulary=151_936, longest_prompt=150, most_tokens=30)
    answers = await send_all(large, cases, spread=1)
    for case, choices in zip(cases, answers, strict=True):
        case.check(evidence, large_versions, choices)
    evidence.check_edges(floor=2)
    assert evidence.counts["sets"] > 300


async def test_top_p_keeps_about_eight(large, large_versions, evidence):
    params = {"top_p": 0.95, "top_k": 512, "temperature": 1.0, "max_tokens": 40, "logprobs": 0, "n": 4}
    case = Case("top_p .95", byte_ids("about eight"), params | {"ignore_eos": True}, transport="both")
    async with large.client() as client:
        case.check(evidence, large_versions, await case.send(client))
    evidence.check_edges(floor=1)
    assert 4 <= sum(evidence.sizes) / len(evidence.sizes) <= 16


REFUSED = {
    "top_p without top_k": ({"top_p": 0.9}, {}, "top_k"),
    "min_p without top_k": ({"min_p": 0.1}, {}, "top_k"),
    "bad_words without top_k": ({"bad_words": ["z"]}, {}, "top_k"),
    "too wide a top_k": ({"top_k": 513}, {}, "512"),
    "the whole vocabulary": ({}, {"kept_tokens": True}, "top_k"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sets_wider_than_the_capture_are_refused(large, name):
    params, extra, way_out = REFUSED[name]
    body = {"token_ids": [9, 10], "sampling_params": params | {"max_tokens": 2}}
    refused = large.generate(body | extra)
    assert refused.status_code == 400
    assert way_out in error_of(refused)
    assert large.generate(body | {"kept_tokens": False}).status_code == 200


async def test_ties_at_512(large, large_versions, evidence):
    distinct = 1500  # 101 or 102 ids share each logit
    model = large_vocabulary_model(seed=3, sharpness=6.0)
    tie_rows(model, distinct)
    version = large_versions.publish_model(model)
    large.update(version)
    reference = TiedReference(large_versions[directory_name(version)], distinct)
    await check_ties(large, reference, distinct, [5, 50, 512], [512], evidence)


async def test_ctrl_c_in_a_terminal_lets_requests_end(large):
    """The last test of this server. The signal reaches every process of it, and only the server heeds it."""
    params = {"top_k": 20, "max_tokens": 100, "n": 2, "ignore_eos": True}
    body = {"token_ids": byte_ids("interrupt"), "sampling_params": params, "stream": True}
    lines: list[str] = []
    async with (
        large.client() as client,
        client.stream("POST", "/inference/v1/generate", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if not lines:  # the first token is there
                os.killpg(large.process.popen.pid, signal.SIGINT)
            lines.append(line)
    assert [choice.finish_reason for choice in of_events(lines)] == ["length"] * 2
    assert large.process.wait_until_gone() == []
    assert large.process.popen.returncode == 0
    log = large.process.log.read_text()
    assert "EngineCore: trigger received signal=SIGINT" not in log
    assert "leaked" not in log
    assert "Traceback" not in log
