"""A model on two ranks (tensor parallel): the sets of one."""

import os
import signal
from pathlib import Path

import pytest

from .cases import mixed_cases
from .conftest import TINY_ENGINE
from .server import keptset_server
from .test_exact_sets import send_all

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(1500),
]  # two servers may have to start


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_versions):
    directory = tmp_path_factory.mktemp("two-ranks")
    engine = TINY_ENGINE | {"tensor_parallel_size": 2}  # a worker more to start, on the same cores
    with keptset_server(directory, tiny_versions.base, **engine) as server:
        yield server


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


async def test_two_ranks_record_the_sets_of_one(two_ranks, tiny, tiny_versions, evidence):
    cases = mixed_cases(seed=3, rounds=2, vocabulary=261, longest_prompt=60, most_tokens=20)
    answers = await send_all(two_ranks, cases, spread=0)
    for case, choices in zip(cases, answers, strict=True):
        case.check(evidence, tiny_versions, choices)
    assert evidence.counts["sets"] > 200
    seeded = [case for case in cases if "seed" in case.sampling_params]
    alone, choices, same = await send_all(tiny, seeded, spread=0), 0, 0
    for case, one, two in zip(seeded, alone, await send_all(two_ranks, seeded, spread=0), strict=True):
        case.check(evidence, tiny_versions, two)
        for mine, theirs in zip(one, two, strict=True):
            same += mine.token_ids == theirs.token_ids and mine.kept == theirs.kept
            choices += 1
    # Two ranks add up in another order: an id at a border may fall on its other side, which the checks above
    # know, and what is sampled from there on is something else. Of hundreds of sets that is one or none.
    assert choices - 1 <= same
    assert "in place in worker 1" in two_ranks.process.log.read_text(), "both ranks were asked"


def test_an_engine_that_dies_by_itself_ends_the_server(two_ranks):
    """The last test of this server. Nobody asks for anything, and nobody stops it."""
    engines = [pid for pid in two_ranks.process.alive() if "EngineCore" in title(pid)]
    assert engines, two_ranks.process.titles()
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    assert two_ranks.process.wait_until_gone() == []
    assert two_ranks.process.popen.returncode == 1
    log = two_ranks.process.log.read_text()
    assert "EngineDeadError" in log
    assert "keptset-inference: the engine died while it served; its log is above" in log
