"""Who asks for no masks notices nothing: same seed, same bytes as with capture off, and as stock vLLM."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from numpy import float32  # ours writes as many digits as that has

from ..models.tokenizer import byte_ids
from .answers import error_of, of_json
from .conftest import TINY_ENGINE
from .server import ANSWER_TIMEOUT, Server, keptset_server, stock_server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def others(tmp_path_factory, tiny_versions):
    """(ours with capture off, stock vLLM), both with the engine arguments of `tiny`, started together."""
    directory = tmp_path_factory.mktemp("neutral")
    contexts = [
        keptset_server(directory / "off", tiny_versions.base, capture=False, **TINY_ENGINE),
        stock_server(directory / "stock", tiny_versions.base, **TINY_ENGINE),
    ]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        started = [pool.submit(context.__enter__) for context in contexts]
        for context, future in zip(contexts, started, strict=True):
            if future.exception() is None:
                stack.push(context)
        yield tuple(future.result() for future in started)


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


BODIES = {
    "completion, seeded": ("/v1/completions", {"prompt": "one", "max_tokens": 24, "seed": 1, "logprobs": 2}),
    "completion of ids, truncated": (
        "/v1/completions",
        {"prompt": [9, 60, 33], "max_tokens": 24, "seed": 2, "top_p": 0.9, "top_k": 30, "logprobs": 0},
    ),
    "completion, top_p and min_p": (
        "/v1/completions",
        {"prompt": "cut", "max_tokens": 24, "seed": 3, "top_p": 0.8, "min_p": 0.05, "logprobs": 1, "n": 2},
    ),
    "completion, greedy": ("/v1/completions", {"prompt": "greedy " * 14, "max_tokens": 24, "temperature": 0}),
    "completion, bent": (
        "/v1/completions",
        {"prompt": "bent", "max_tokens": 24, "seed": 4, "presence_penalty": 0.7, "logit_bias": {"70": 3}},
    ),
    "completion, structured": (
        "/v1/completions",
        {"prompt": "n =", "max_tokens": 12, "seed": 5, "structured_outputs": {"regex": "[0-9]{3}"}},
    ),
    "completion, its prompt echoed with logprobs": (
        "/v1/completions",
        {"prompt": "echo", "max_tokens": 4, "seed": 6, "echo": True, "logprobs": 1},
    ),
    "chat, seeded": (
        "/v1/chat/completions",
        {"messages": say("hi"), "max_tokens": 24, "seed": 7, "logprobs": True, "top_logprobs": 3},
    ),
    "chat, truncated": (
        "/v1/chat/completions",
        {"messages": say("yo"), "max_tokens": 24, "seed": 8, "top_k": 20, "logprobs": True},
    ),
    "chat, streamed": (
        "/v1/chat/completions",
        {"messages": say("st"), "max_tokens": 24, "seed": 9, "top_p": 0.7, "stream": True},
    ),
}  # fmt: skip

GENERATE = {
    "untruncated": {"seed": 11, "logprobs": 0},
    "three at once": {"seed": 12, "n": 3, "logprobs": 1},
    "truncated": {"seed": 13, "top_k": 40, "top_p": 0.9, "logprobs": 0},
    "top_p alone": {"seed": 14, "top_p": 0.9, "logprobs": 0},
    "greedy": {"temperature": 0.0, "logprobs": 0},
    "bent": {"seed": 15, "repetition_penalty": 1.2, "logprobs": 0},
}


@pytest.fixture(scope="module")
def at_base(tiny, tiny_versions) -> Server:
    """The capturing server with the weights that it was started with, whatever other tests loaded."""
    if tiny.call("GET", "/keptset/v1/status").json()["weight_version"] is not None:
        tiny.update(tiny_versions.publish(tiny_versions.base))
    return tiny


def without_names(server: Server, path: str, body: dict) -> list:
    """What a client gets, without the ids and times that differ from request to request."""
    answer = server.call("POST", path, json={"model": server.model} | body)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = [answer.text]
    parsed = [json.loads(event) for event in events]
    for event in parsed:
        for name in ("id", "created"):
            event.pop(name)
    if body.get("stream"):  # how tokens fall into events is a matter of time
        deltas = [event["choices"][0] for event in parsed]
        text = "".join(delta["delta"].get("content") or "" for delta in deltas)
        return [text, deltas[-1]["finish_reason"]]
    return parsed


@pytest.mark.parametrize("name", BODIES)
def test_vllms_own_routes_answer_the_same(at_base, others, name):
    off, stock = others
    path, body = BODIES[name]
    answers = [without_names(server, path, body) for server in (at_base, off, stock)]
    assert answers[1] == answers[2], "capture off differs from stock vLLM"
    assert answers[0] == answers[1], "capture on differs from capture off"


@pytest.mark.parametrize("name", GENERATE)
def test_generate_without_masks_samples_the_same(at_base, others, name):
    off, stock = others
    # short prompts: seeds and a prompt in chunks end stock vLLM on a CPU
    params = GENERATE[name] | {"max_tokens": 24, "ignore_eos": True}
    body = {"token_ids": byte_ids(name), "sampling_params": params}
    answers = []
    for server, extra in ((at_base, {"kept_tokens": False}), (off, {}), (stock, {"model": stock.model})):
        answer = server.generate(body | extra)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        if server is not stock:
            assert all(choice["kept_tokens"] is None for choice in choices)
        answers.append(
            [
                (
                    c["token_ids"],
                    c["finish_reason"],
                    [float32(e["logprob"]) for e in c["logprobs"]["content"]],
                )
                for c in choices
            ]
        )
    assert answers[1] == answers[2], "capture off differs from stock vLLM"
    assert answers[0] == answers[1], "capture on differs from capture off"


def test_requests_with_masks_in_between_change_nothing(at_base, others):
    """The same seeded request, before, after and beside requests that are captured."""
    off, _ = others
    params = {"seed": 21, "max_tokens": 24, "top_k": 30, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": byte_ids("between"), "sampling_params": params, "kept_tokens": False}
    expected = of_json(off.generate(body).json())
    for _ in range(2):
        masked = {"token_ids": byte_ids("captured"), "sampling_params": {"top_k": 3, "max_tokens": 5}}
        assert of_json(at_base.generate(masked).json())[0].kept is not None
        (choice,) = of_json(at_base.generate(body).json())
        assert choice.token_ids == expected[0].token_ids
        assert choice.logprobs == expected[0].logprobs


def test_a_server_without_capture_says_so(others):
    off, _ = others
    capture = off.call("GET", "/keptset/v1/status").json()["capture"]
    assert (capture["enabled"], capture["kind"], capture["width"]) == (False, "off", None)
    body = {"token_ids": [9], "sampling_params": {"top_k": 5, "max_tokens": 2}}
    assert of_json(off.generate(body).json())[0].kept is None
    refused = off.generate(body | {"kept_tokens": True})
    assert refused.status_code == 400
    assert "enable_return_sampling_mask" in error_of(refused), "names the way out"


def test_weights_cannot_be_updated_where_there_is_no_root(others):
    off, _ = others
    refused = off.call("POST", "/keptset/v1/weights", json={"version": 1})
    assert refused.status_code in (404, 409, 422)
    assert "weights_dir" in error_of(refused)


def test_a_killed_server_leaves_no_engine(others):
    """Kill -9 while it works: nobody is told, and still no process may stay."""
    off, _ = others
    assert "EngineCore" in off.process.titles(), "the engine has a process of its own"
    body = {"token_ids": [9, 8], "sampling_params": {"max_tokens": 200, "ignore_eos": True}, "stream": True}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=off.url, timeout=ANSWER_TIMEOUT))
        stream = stack.enter_context(client.stream("POST", "/inference/v1/generate", json=body))
        next(stream.iter_lines())
        off.process.popen.send_signal(signal.SIGKILL)
    assert off.process.wait_until_gone() == []
