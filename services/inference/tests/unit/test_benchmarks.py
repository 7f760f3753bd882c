"""How the benchmarks judge pairs."""

import importlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "arms.py"


@pytest.fixture(scope="module")
def arms():
    spec = importlib.util.spec_from_file_location("benchmark_arms", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_interval_holds_the_ratio_and_is_wider_where_pairs_differ(arms):
    same = arms.interval([0.98] * 10)
    assert (same["ratio"], same["low"], same["high"], same["median"]) == (0.98, 0.98, 0.98, 0.98)
    apart = arms.interval([0.5, 2.0] * 5)
    assert apart["low"] < apart["ratio"] == 1.0 < apart["high"]
    assert arms.interval([0.98] * 9 + [0.4])["median"] == 0.98


def test_runs_are_compared_round_by_round(arms):
    rates = {"capture v1": [98.0, 49.0], "off V1": [100.0, 50.0, 7.0], "off V2": [1.0]}
    compared = arms.compare(rates)
    assert list(compared) == ["capture v1 / off V1"]
    assert compared["capture v1 / off V1"]["ratio"] == 0.98
    assert compared["capture v1 / off V1"]["pairs"] == 2


def test_every_other_round_goes_backwards(arms):
    assert [arms.order(["a", "b"], i) for i in range(2)] == [["a", "b"], ["b", "a"]]


def test_every_pair_is_of_arms_that_there_are(arms, tmp_path):
    assert {name for pair in arms.PAIRS for name in pair} <= set(arms.ARMS)
    assert arms.ARMS["capture v1"].environment(tmp_path)[arms.RUNNER] == "0"
    assert arms.ARMS["stock masks"].environment(tmp_path)[arms.RUNNER] == "1"


@pytest.mark.parametrize("outside", ["0", "1"])
def test_an_arm_has_flashinfer_or_not_whatever_the_shell_says(arms, tmp_path, monkeypatch, outside):
    monkeypatch.setenv(arms.FLASHINFER, outside)
    asked = {name: arms.ARMS[name].environment(tmp_path)[arms.FLASHINFER] for name in arms.ARMS}
    assert (asked["stock FlashInfer"], asked["stock defaults"], asked["off V2"]) == ("1", "0", outside)


@pytest.fixture
def exactness(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    return importlib.import_module("exactness")


@pytest.fixture
def again(exactness):
    return importlib.import_module("again")


def test_less_than_was_asked_for_proves_nothing(exactness, again):
    exact = exactness.exact
    counts = dict.fromkeys(("wrong", "sampled_outside", "unasked", "preemptions"), 0)
    counts["again"] = dict.fromkeys(again.NAMES, 0) | {"tokens": 2_500}
    assert exact(counts | {"tokens": 50_000}, 50_000)
    assert exact(counts | {"tokens": 50_000, "again": None}, 50_000), "with drafts"
    assert not exact(counts | {"tokens": 40_960}, 50_000)
    assert not exact(counts | {"tokens": 0}, 0)
    for fault in ("wrong", "sampled_outside", "unasked"):
        assert not exact(counts | {"tokens": 50_000, fault: 1}, 50_000)
    for repeated in ({"wrong": 1}, {"tokens": 2_499}):
        assert not exact(counts | {"tokens": 50_000, "again": counts["again"] | repeated}, 50_000)
    assert not exact(counts | {"tokens": 50_000}, 50_000, preempted=True)
    assert exact(counts | {"tokens": 50_000, "preemptions": 1}, 50_000, preempted=True)


def test_every_kind_is_one_that_vllm_takes_and_drafts_get_none_with_min_p(exactness):
    for capture in ("v1", "native"):
        kinds = exactness.kinds_of(capture, drafts=False)
        for kind in kinds:
            params = exactness.parameters(kind, logprobs=5, max_tokens=8, wants=True)
            assert params.extra_args, kind
        asked = {name for kind in kinds for name in kind}
        assert {"min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "min_p"} <= asked
        assert not any("min_p" in kind for kind in exactness.kinds_of(capture, drafts=True))


def said(again, token: int, ids: list[int], logprobs: list[float]):
    return again.Position(token, np.array(ids), np.array(logprobs, np.float32))


ONE = (4, [2, 4, 7, 9], [-3.0, -0.3, -2.0, -3.1])


@pytest.mark.parametrize(
    ("token", "ids", "logprob", "equal", "wrong"),
    [
        (4, [2, 4, 7, 9], -0.3, 1, 0),
        (4, [2, 4, 7], -0.3, 0, 0),  # of two ids at the border one is gone
        (4, [2, 4, 7, 8, 9], -0.3, 0, 0),
        (4, [2, 4, 9], -0.3, 0, 1),  # 7 is far from the border, and e^-2 is much
        (4, [4, 11, 12], -0.3, 0, 1),  # somebody else's
        (4, [2, 7, 9], -0.3, 0, 1),  # without what was sampled
        (4, [2, 4, 7, 9], -1.5, 1, 1),  # somebody else's logprob
    ],
)
def test_a_packed_set_may_differ_at_its_border_and_nowhere_else(again, token, ids, logprob, equal, wrong):
    other = said(again, token, ids, [logprob])
    found = again.compare([said(again, *ONE)], [other], again.ROUNDING["bfloat16"])
    assert found == {"tokens": 1, "sets_equal": equal, "wrong": wrong, "other_tokens": 0}


def test_float32_allows_less_than_bfloat16(again):
    runs = [said(again, *ONE)], [said(again, 4, [4, 7, 9], [-0.3])]  # 2 is 0.1 nats above the border
    wrong = [again.compare(*runs, again.ROUNDING[kind])["wrong"] for kind in ("bfloat16", "float32")]
    assert wrong == [0, 1]


def test_runs_are_compared_up_to_the_first_token_that_differs(again):
    one, other = said(again, *ONE), said(again, 2, ONE[1], [-3.0])
    same = said(again, 4, ONE[1], [-0.3])
    found = again.compare([one, one, one], [same, other, other], again.ROUNDING["float32"])
    assert found == {"tokens": 1, "sets_equal": 1, "wrong": 0, "other_tokens": 1}
    shorter = again.compare([one, one], [same], again.ROUNDING["float32"])
    assert (shorter["tokens"], shorter["wrong"]) == (1, 1), "the same request ends after the same token"


def test_what_the_results_say_of_two_ranks_is_within_the_bound(exactness):
    found = json.loads((FILE.parent / "results" / "tensor-parallel-h200.json").read_text())["results"]
    most = importlib.import_module("tensor_parallel").MOST
    assert found
    assert all(run["ids_that_differ"] <= most for run in found.values())
