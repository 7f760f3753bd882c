"""New weights under a running server: every token is from the version that its span names."""

import asyncio
import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from ..models.published import directory_name, publish, write_manifest
from ..models.tiny import save_model, tiny_model
from ..models.tokenizer import byte_ids
from .answers import error_of
from .cases import Case
from .evidence import Evidence

pytestmark = pytest.mark.engine

CUT = {"top_k": 50, "top_p": 0.95, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}


@pytest.fixture
def loaded(tiny, tiny_versions) -> str:
    """A version of its own, loaded: the name that spans give it."""
    version = tiny_versions.publish_model(tiny_model(seed=100 + tiny_versions.last))
    assert tiny.update(version)["version"] == version
    return directory_name(version)


def serving(server) -> str:
    """The version that a request is answered with now."""
    body = {"token_ids": [9, 9], "sampling_params": CUT | {"max_tokens": 1}}
    (span,) = server.generate(body).json()["choices"][0]["weight_versions"]
    status = server.call("GET", "/keptset/v1/status").json()["weight_version"]
    assert span["version"] == ("base" if status is None else directory_name(status))
    return span["version"]


async def check_exact(server, versions, evidence: Evidence, prompt: list[int], version: str) -> None:
    async with server.client() as client:
        case = Case("after", prompt, CUT | {"max_tokens": 12})
        choices = await case.send(client)
    case.check(evidence, versions, choices)
    assert [name for choice in choices for name, _, _ in choice.versions] == [version]


async def test_each_token_is_from_the_version_its_span_names(tiny, tiny_versions, evidence, loaded):
    # torchforge#251, vllm#54443: update while requests run: a rollout of two versions, unnoticed
    news = [tiny_versions.publish_model(tiny_model(seed=200 + i)) for i in range(6)]
    known = [loaded, *map(directory_name, news)]
    enough = asyncio.Event()
    answers: list[tuple[Case, list]] = []

    async def lane(client: httpx.AsyncClient, number: int) -> None:
        """One request after another, of a length of its own: the lanes do not end in step."""
        prompt = byte_ids(f"request {number} runs while the weights change")
        while not enough.is_set():
            # more of them than run at once: some wait, and start on the version of then
            params = CUT | {"max_tokens": 60 + 10 * number, "seed": len(answers)}
            case = Case("running", prompt, params)
            answers.append((case, await case.send(client)))

    def across() -> list[tuple[str, ...]]:
        spans = [tuple(version for version, _, _ in choices[0].versions) for _, choices in answers]
        return [names for names in spans if len(names) > 1]

    async with tiny.client() as client:
        lanes = [asyncio.create_task(lane(client, number)) for number in range(12)]
        body = {
            "token_ids": byte_ids("streamed"),
            "sampling_params": CUT | {"max_tokens": 200},
            "stream": True,
        }
        events = 0
        async with client.stream("POST", "/inference/v1/generate", json=body) as stream:
            async for line in stream.aiter_lines():
                events += line.startswith("data: {")
                if events == 20:
                    break  # it runs, and so do others
            else:
                raise AssertionError("the stream ended before the update")
        for new in news:  # an update between two requests crosses none: then the next one is looked at
            began = time.monotonic()
            answer = (await client.post("/keptset/v1/weights", json={"version": new})).json()
            assert answer["version"] == new
            assert 0 < answer["pause_seconds"] <= answer["seconds"] < time.monotonic() - began
            answered = len(answers)
            while len(answers) < answered + len(lanes) and not any(task.done() for task in lanes):
                await asyncio.sleep(0.02)
            if across():
                break
        enough.set()
        await asyncio.gather(*lanes)
    for case, choices in answers:
        case.check(evidence, tiny_versions, choices)
        first = known.index(choices[0].versions[0][0])
        names = [version for version, _, _ in choices[0].versions]
        assert names == known[first : first + len(names)], "spans skip a version"
    assert across(), "no request lived through an update"
    evidence.count("requests across an update", len(across()))


async def test_an_identical_prompt_reuses_no_old_cache(tiny, tiny_versions, evidence, loaded):
    # NeMo-RL#4018, prime-rl#1650: weights updated, prefix cache kept
    prompt = [5 + (7 * i * i) % 256 for i in range(130)]  # several blocks of the cache
    await check_exact(tiny, tiny_versions, evidence, prompt, loaded)
    hits = tiny.metric("vllm:prefix_cache_hits_total")
    await check_exact(tiny, tiny_versions, evidence, prompt, loaded)
    assert tiny.metric("vllm:prefix_cache_hits_total") >= hits + 64, (
        "nothing to reuse: the test proves nothing"
    )
    new = tiny_versions.publish_model(tiny_model(seed=300))
    tiny.update(new)
    await check_exact(tiny, tiny_versions, evidence, prompt, directory_name(new))


def test_the_same_version_again_does_nothing(tiny, loaded):
    version = int(loaded[1:])
    again = tiny.update(version)
    assert again["version"] == version
    assert again["pause_seconds"] == 0
    assert serving(tiny) == loaded


async def test_concurrent_updates_end_in_one_whole_version(tiny, tiny_versions, evidence, loaded):
    versions = [tiny_versions.publish_model(tiny_model(seed=400 + i)) for i in range(2)]
    async with tiny.client() as client:
        ask = [client.post("/keptset/v1/weights", json={"version": v}) for v in (*versions, versions[1])]
        answers = await asyncio.gather(*ask)
    assert {answer.status_code for answer in answers} <= {200, 409}
    accepted = [v for v, a in zip((*versions, versions[1]), answers, strict=True) if a.status_code == 200]
    assert accepted
    now = serving(tiny)
    assert now in {directory_name(version) for version in accepted}
    await check_exact(tiny, tiny_versions, evidence, byte_ids("after two at once"), now)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], None], *, manifest: bool):
    """Rewrite the tensors; with a manifest of its own the damage shows against the model only."""

    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        if manifest:
            write_manifest(directory, int(directory.name[1:]))

    return spoil


NORM, MIDDLE = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def narrow(tensors):
    tensors[MIDDLE] = tensors[MIDDLE][:-1].clone()


def half(tensors):
    tensors[MIDDLE] = tensors[MIDDLE].half()


def flip_a_byte(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def cut_the_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def edit_manifest(edit: Callable[[dict], None]):
    def spoil(directory: Path) -> None:
        file = directory / "manifest.json"
        manifest = json.loads(file.read_text())
        edit(manifest)
        file.write_text(json.dumps(manifest))

    return spoil


def link_to_outside(directory: Path) -> None:
    outside = directory.parent.parent / f"outside-{directory.name}"
    directory.rename(outside)
    directory.symlink_to(outside)


def link_the_file_to_outside(directory: Path) -> None:
    outside = directory.parent.parent / f"outside-{directory.name}.safetensors"
    (directory / "model.safetensors").rename(outside)
    (directory / "model.safetensors").symlink_to(outside)


SPOILED = {
    "no directory": shutil.rmtree,
    "no manifest": lambda directory: (directory / "manifest.json").unlink(),
    "no tensors": lambda directory: (directory / "model.safetensors").unlink(),
    "manifest is no JSON": lambda directory: (directory / "manifest.json").write_text("{"),
    "manifest of another version": edit_manifest(lambda m: m.update(version=1)),
    "manifest lacks a tensor": edit_manifest(lambda m: m["tensors"].pop(MIDDLE)),
    "manifest has a tensor more": edit_manifest(lambda m: m["tensors"].update(more=m["tensors"][NORM])),
    "another hash": edit_manifest(lambda m: m["tensors"][NORM].update(blake2b="0" * 32)),
    "file lacks a tensor": change_tensors(lambda t: t.pop(MIDDLE), manifest=False),
    "model wants a tensor more": change_tensors(lambda t: t.pop(MIDDLE), manifest=True),
    "model does not know a tensor": change_tensors(
        lambda t: t.update({"model.layers.7.mlp.up_proj.weight": t[MIDDLE].clone()}), manifest=True
    ),
    "another shape": change_tensors(narrow, manifest=True),
    "another type": change_tensors(half, manifest=False),
    "other values": change_tensors(lambda t: t[NORM].mul_(1.5), manifest=False),
    "a flipped byte": flip_a_byte,
    "a file cut short": cut_the_file,
    "a link out of the root": link_to_outside,
    "a file linked out of the root": link_the_file_to_outside,
}


async def test_spoiled_weights_leave_the_old_ones_serving(tiny, tiny_versions, evidence, loaded):
    """Refused before the engine is touched: a request that runs meanwhile sees one version, and no pause."""
    good = save_model(tiny_model(seed=500), tiny_versions.root.parent / "good")
    prompt, failures = byte_ids("still the old weights"), []
    case = Case("meanwhile", prompt, CUT | {"max_tokens": 200})
    preempted = tiny.metric("vllm:num_preemptions_total")
    for number, (name, spoil) in enumerate(SPOILED.items(), 900_000):
        spoil(publish(good, tiny_versions.root, number))
        async with tiny.client() as client:
            running = asyncio.create_task(case.send(client)) if number % 3 == 0 else None
            refused = await client.post("/keptset/v1/weights", json={"version": number})
            if running:
                choices = await running
                case.check(evidence, tiny_versions, choices)
                if [version for version, _, _ in choices[0].versions] != [loaded]:
                    failures.append((name, choices[0].versions))
        if refused.status_code not in (404, 409, 422):
            failures.append((name, refused.status_code, refused.text))
        else:
            assert len(error_of(refused)) > 20
        if serving(tiny) != loaded:
            failures.append((name, "now serves", serving(tiny)))
            tiny.update(int(loaded[1:]))
    assert not failures
    assert tiny.metric("vllm:num_preemptions_total") == preempted, "a refused update paused the engine"
    assert tiny.call("GET", "/health").status_code == 200
    await check_exact(tiny, tiny_versions, evidence, prompt, loaded)


async def test_a_full_disk_is_nothing_to_a_running_server(tiny, tiny_versions, evidence, loaded):
    """It writes no file but its log: none may grow any more, and it samples and takes new weights.

    VLLM's progress bar over the log ended an update half-way.
    """
    new = tiny_versions.publish_model(tiny_model(seed=300))
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in tiny.process.alive()}
    assert len(limits) >= 2, "the server and its engine"
    try:
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        await check_exact(tiny, tiny_versions, evidence, byte_ids("no room"), loaded)
        assert tiny.update(new)["version"] == new
        await check_exact(tiny, tiny_versions, evidence, byte_ids("no room"), directory_name(new))
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"version": -1},
        {"version": "1"},
        {"version": 1.5},
        {"version": True},
        {"version": None},
        {"version": 1, "path": "/"},
    ],
)
def test_a_malformed_update_is_refused(tiny, body):
    refused = tiny.call("POST", "/keptset/v1/weights", json=body)
    assert refused.status_code in (400, 422), refused.text
    assert "version" in error_of(refused)
