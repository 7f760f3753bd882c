"""Two engines behind one server (data parallel): sets and new weights of each, also after a sleep."""

import pytest

from ..models.published import directory_name
from ..models.tiny import tiny_model
from .cases import mixed_cases
from .conftest import TINY_ENGINE
from .server import keptset_server
from .test_exact_sets import send_all

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(1500),
]  # two engines start on the same cores


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory, tiny_versions):
    directory = tmp_path_factory.mktemp("two-engines")
    lock = directory / "gpu.lock"
    engine = TINY_ENGINE | {"data_parallel_size": 2}
    with keptset_server(
        directory, tiny_versions.base, weights=tiny_versions.root, gpu_lock=lock, **engine
    ) as server:
        server.wake()
        yield server


def tokens_of_each(server) -> list[float]:
    """Tokens that each engine has sampled, in the order of their numbers."""
    lines = server.call("GET", "/metrics").text.splitlines()
    name = "vllm:generation_tokens_total{"
    return [float(line.split()[-1]) for line in sorted(lines) if line.startswith(name)]


async def sampled_by_both(server, versions, evidence, seed: int) -> set[str]:
    """Cases checked against the reference, which kept both engines busy; the versions of their tokens."""
    before = tokens_of_each(server)
    cases = mixed_cases(seed=seed, rounds=2, vocabulary=261, longest_prompt=60, most_tokens=20)
    answers = await send_all(server, cases, spread=0)
    for case, choices in zip(cases, answers, strict=True):
        case.check(evidence, versions, choices)
    more = [after - earlier for earlier, after in zip(before, tokens_of_each(server), strict=True)]
    assert len(more) == 2, more
    assert min(more) > 50, more
    return {version for choices in answers for choice in choices for version, _, _ in choice.versions}


async def test_both_engines_record_exact_sets_and_load_new_weights(two_engines, tiny_versions, evidence):
    assert await sampled_by_both(two_engines, tiny_versions, evidence, seed=4) == {"base"}
    version = tiny_versions.publish_model(tiny_model(seed=400))
    assert two_engines.update(version)["version"] == version
    assert await sampled_by_both(two_engines, tiny_versions, evidence, seed=5) == {directory_name(version)}
    two_engines.sleep()
    version = tiny_versions.publish_model(tiny_model(seed=401))
    assert two_engines.wake(version)["version"] == version
    assert await sampled_by_both(two_engines, tiny_versions, evidence, seed=6) == {directory_name(version)}
    assert evidence.counts["sets"] > 600
    evidence.check_edges(floor=2)
