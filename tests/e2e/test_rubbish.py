"""A real engine's answers are damaged on their way: what cannot be read is asked for again, a wrong number
stops the run, and what was acknowledged before is there.
"""

import json

import msgspec
import numpy as np
import pytest

from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import decode, encode
from keptset import ports

from ..started import UNTIL_ENDED, UNTIL_HEALTHY
from .damaging_proxy import damaging_proxy

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def cut_off(body: bytes) -> tuple[str, bytes]:
    return "application/msgpack", body[: len(body) * 2 // 3]


def page(body: bytes) -> tuple[str, bytes]:
    return "text/html", b"<html><h1>502 Bad Gateway</h1></html>"


def no_number(body: bytes) -> tuple[str, bytes]:
    """The last logprob of the second choice is NaN."""
    answer = decode(body, GenerateAnswer)
    choice = next(one for one in answer.choices if one.index == 1)
    wrong = choice.logprobs[:-4] + np.float32(np.nan).tobytes()
    choices = [msgspec.structs.replace(c, logprobs=wrong) if c is choice else c for c in answer.choices]
    return "application/msgpack", encode(msgspec.structs.replace(answer, choices=choices))


def test_damage_on_the_way_costs_an_attempt_and_a_wrong_number_stops_the_run(started):
    # 4 prompts a step, and one of them twice: answers 0 to 4, 5 to 9, 10 ...
    damages = {1: cut_off, 7: page, 11: no_number}
    port = ports.pick("127.0.0.1", set())
    with damaging_proxy(f"http://127.0.0.1:{port}", damages) as proxy:
        urls = ("--orchestrator.inference_urls", json.dumps([proxy.url]))
        run = started.run("--orchestrator.steps", 4, "--inference.port", port, *urls)
        code = run.wait(timeout=UNTIL_HEALTHY + UNTIL_ENDED)
    folder = started.folder / "runs" / "short"
    error, log = started.output("keptset", "err"), (folder / "logs" / "orchestrator.log").read_text()
    assert code == 1, log
    said = f"inference server {proxy.url}: request "
    assert said in error
    assert "choice 1: logprobs at position " in error
    assert ": nan is no logprob of a sampled token" in error
    again = [line for line in log.splitlines() if "(attempt 1 of 5)" in line]
    assert all(said in line for line in again)
    assert "cannot be decoded" in again[0]
    assert "Bad Gateway" in again[1]
    assert len(again) == 2

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/error_rate"] == pytest.approx(1 / 5)
        assert row["ratio/max_abs_log"] < 1e-4
        assert row["kept/coverage"] == 1
    results = sorted(path.name for path in (folder / "trainer" / "results").iterdir())
    assert results == ["step-000001.json", "step-000002.json"]
    assert (folder / "weights" / "v000002" / "manifest.json").exists()
    started.assert_nothing_is_left()
