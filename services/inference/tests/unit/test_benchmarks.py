"""How the benchmarks judge pairs."""

import importlib.util
from pathlib import Path

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
    assert (same["ratio"], same["low"], same["high"]) == (0.98, 0.98, 0.98)
    apart = arms.interval([0.5, 2.0] * 5)
    assert apart["low"] < apart["ratio"] == 1.0 < apart["high"]


def test_runs_are_compared_round_by_round(arms):
    rates = {"capture v1": [98.0, 49.0], "off V1": [100.0, 50.0, 7.0], "off V2": [1.0]}
    compared = arms.compare(rates)
    assert list(compared) == ["capture v1 / off V1"]
    assert compared["capture v1 / off V1"]["ratio"] == 0.98
    assert compared["capture v1 / off V1"]["pairs"] == 2


def test_every_other_round_goes_backwards(arms):
    assert [arms.order(["a", "b"], i) for i in range(2)] == [["a", "b"], ["b", "a"]]


def test_every_pair_is_of_arms_that_there_are(arms):
    assert {name for pair in arms.PAIRS for name in pair} <= set(arms.ARMS)
    assert arms.ARMS["capture v1"].environment()[arms.RUNNER] == "0"
    assert arms.ARMS["stock masks"].environment()[arms.RUNNER] == "1"
