"""Sources whose generator is another model, over HTTP: what is asked of it, and what is made of it."""

import json

import numpy as np
import pytest

from keptset_orchestrator import (
    AnswerError,
    ChatTokenizer,
    PeerMismatchError,
    PeerRefusedError,
    RolloutFailedError,
)
from keptset_settings import (
    CalculatorSettings,
    FrozenGenerator,
    SamplingSettings,
    SftAlgorithm,
    SourceSettings,
)

from .driving import Drive
from .fake_endpoint import FakeEndpoint
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .small_tokenizer import END


def frozen(endpoint: FakeEndpoint, **changes) -> SourceSettings:
    own = {name: changes.pop(name) for name in ("api_key_env", "send_seed") if name in changes}
    generator = FrozenGenerator(url=endpoint.url, model="teacher", **own)
    return SourceSettings(**{"name": "books", "generator": generator} | changes)


@pytest.fixture
def mixed(drive: Drive, endpoint: FakeEndpoint) -> Drive:
    """A policy source that truncates, and a frozen one beside it."""
    drive.settings.train.prompts_per_step = 4
    drive.settings.steps = 1
    sampling = SamplingSettings(top_p=0.9, temperature=0.0, max_tokens=7)
    drive.settings.train.source = [
        SourceSettings(name="letters"),
        frozen(endpoint, sampling=sampling, group_size=2),
    ]
    return drive


async def test_frozen_source_with_top_p_stands_beside_a_truncating_one_in_one_batch(
    mixed: Drive, trainer: FakeTrainer, inference: FakeInference, endpoint: FakeEndpoint
):
    endpoint.says = lambda messages, seed: messages[-1]["content"][::-1]
    (row,) = await mixed()
    samples = trainer.batches[1].samples
    assert [s.source for s in samples] == ["letters"] * 8 + ["books"] * 4
    assert all(s.must_have_masks and s.kept() is not None for s in samples[:8])
    for sample in samples[8:]:
        arrays = sample.arrays()
        assert sample.objective == "cross_entropy"
        assert sample.kept() is None
        assert not sample.must_have_masks
        assert sample.weight_versions == []
        assert not arrays.logprobs.any()
        assert (arrays.temperatures == 1).all()
        assert (arrays.advantages[arrays.loss_mask] == 1).all()
        assert arrays.token_ids[-1] == END
        assert arrays.loss_mask[-1]
    assert row["source/books/reward/mean"] == 1.0
    assert row["reward/mean"] == row["source/letters/reward/mean"] < 1, "the policy's, not the teacher's"
    assert len(inference.requests) == 2


async def test_frozen_generator_gets_its_own_sampling_and_nothing_else(mixed: Drive, endpoint: FakeEndpoint):
    await mixed()
    assert len(endpoint.chats) == 4
    for body in endpoint.chats:
        assert body.keys() == {"model", "messages", "temperature", "top_p", "max_tokens", "seed"}
        assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == (
            "teacher",
            0,
            0.9,
            7,
        )
        assert [message["role"] for message in body["messages"]] == ["user"]
    assert len({body["seed"] for body in endpoint.chats}) == 4, "rollouts of a prompt must not be copies"


async def test_endpoint_that_refuses_a_seed_is_used_without_one(mixed: Drive, endpoint: FakeEndpoint):
    endpoint.takes_seed = False
    with pytest.raises(
        PeerRefusedError, match=r"400 Unrec.* seed; set send_seed = false in the source's gen"
    ):
        await mixed()
    mixed.settings.train.source[1] = frozen(endpoint, send_seed=False, group_size=2)
    await mixed()
    seedless = [body.keys() for body in endpoint.chats if "seed" not in body]
    assert seedless == [{"model", "messages"}] * 4
    recorded = [json.loads(line) for line in lines_of(mixed)]
    assert [line["sampling"] for line in recorded if line["source"] == "books"] == [{"truncates": False}] * 4


@pytest.mark.parametrize("source", [{"name": "seed"}, {"send_seed": False}])
async def test_refusal_that_is_not_of_the_seed_gets_no_such_advice(
    source: dict, mixed: Drive, endpoint: FakeEndpoint
):
    mixed.settings.train.source[1] = frozen(endpoint, **source)
    endpoint.faults = [400] * 100
    with pytest.raises(PeerRefusedError, match=r"told to answer 400$"):
        await mixed()


async def test_what_looks_like_a_special_token_is_text(
    mixed: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint, tokenizer_dir
):
    endpoint.says = lambda messages, seed: "a<|end|>b"
    await mixed()
    arrays = trainer.batches[1].samples[-1].arrays()
    said = arrays.token_ids[arrays.loss_mask].tolist()
    assert said.count(END) == 1
    assert said[-1] == END
    assert ChatTokenizer(tokenizer_dir).decode(said[:-1]) == "a<|end|>b"


async def test_text_that_was_cut_off_gets_no_end(mixed: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint):
    endpoint.finish_reason = "length"
    (row,) = await mixed()
    assert END not in trainer.batches[1].samples[-1].arrays().token_ids[-4:]
    assert row["rollout/truncated_share"] >= 4 / 12


@pytest.mark.parametrize(
    ("asked", "answered", "ended"),
    [
        ({}, {}, True),
        ({"stop": []}, {}, True),
        ({"stop": "\n"}, {}, False),
        ({"stop_token_ids": [9]}, {}, False),
        ({"stop": "\n"}, {"stop_reason": None}, True),
        ({"stop": "\n"}, {"stop_reason": "\n"}, False),
        ({}, {"stop_reason": "\n"}, False),  # by a default of the endpoint's
        ({"stop_token_ids": [9]}, {"stop_reason": 9}, False),
        ({"stop_token_ids": [9]}, {"stop_reason": 7}, True),  # another end token of its model
    ],
)
async def test_end_is_taught_only_where_the_teacher_said_it(
    asked: dict, answered: dict, ended: bool, mixed: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint
):
    mixed.settings.train.source = [frozen(endpoint, sampling=SamplingSettings(extra_body=asked))]
    endpoint.stop_reason = answered
    (row,) = await mixed()
    for sample in trainer.batches[1].samples:
        arrays = sample.arrays()
        assert (arrays.token_ids[arrays.loss_mask][-1] == END) == ended
    assert row["rollout/truncated_share"] == 0


async def test_rollout_longer_than_a_row_is_cut_and_counted(
    mixed: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint
):
    endpoint.says = lambda messages, seed: "x" * 1000
    (row,) = await mixed()
    assert [s.num_tokens for s in trainer.batches[1].samples[8:]] == [256] * 4
    assert row["rollout/cut_share"] == pytest.approx(4 / 12)
    check = [json.loads(line) for line in lines_of(mixed)]
    assert [line["cut_tokens"] > 700 for line in check] == [False] * 8 + [True] * 4


async def test_rollouts_below_the_least_reward_are_not_trained_on(
    mixed: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint
):
    mixed.settings.train.source[1].algorithm = SftAlgorithm(min_reward=1.0)
    endpoint.says = lambda messages, seed: messages[-1]["content"][::-1] if seed % 2 else "no"
    (row,) = await mixed()
    right = sum(body["seed"] % 2 for body in endpoint.chats)
    assert [s.source for s in trainer.batches[1].samples].count("books") == right
    assert row["filter/min_reward/share"] == pytest.approx((4 - right) / 12)


async def test_frozen_generator_may_be_the_only_one(
    drive: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint, inference: FakeInference
):
    drive.settings.train.source = [frozen(endpoint)]
    inference.capture = {"enabled": False, "kind": "off", "width": None, "proven": False}
    rows = await drive()
    assert len(rows) == 3
    assert inference.requests == []
    assert len(endpoint.chats) == 3 * 2 * 4


async def test_turns_of_a_frozen_generator_are_one_sequence(
    drive: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint, tokenizer_dir
):
    drive.settings.steps = 1
    environment = CalculatorSettings(terms=2, max_number=9, max_turns=3)
    drive.settings.train.source = [frozen(endpoint, environment=environment, group_size=1)]
    trainer.row_tokens = 512
    answered = {1: "<calc>2*3</calc>", 2: "<calc>6+1</calc>", 3: "7"}
    endpoint.says = lambda messages, seed: answered[sum(m["role"] == "user" for m in messages)]
    await drive()
    conversation = endpoint.chats[-1]["messages"]
    assert [m["role"] for m in conversation] == ["system", "user", *["assistant", "user"] * 2]
    assert [m["content"] for m in conversation[2:]] == ["<calc>2*3</calc>", "6", "<calc>6+1</calc>", "7"]
    sample = trainer.batches[1].samples[0]
    arrays, tokenizer = sample.arrays(), ChatTokenizer(tokenizer_dir)
    text = tokenizer.decode(arrays.token_ids.tolist())
    assert text.endswith(
        "<|assistant|><calc>2*3</calc><|end|><|user|>6<|end|><|assistant|><calc>6+1</calc><|end|>"
        "<|user|>7<|end|><|assistant|>7<|end|>"
    )
    trained = tokenizer.decode(arrays.token_ids[arrays.loss_mask].tolist())
    assert trained == "<calc>2*3</calc><|end|><calc>6+1</calc><|end|>7<|end|>"


async def test_turns_that_end_by_a_stop_string_have_their_ends_as_context(
    drive: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint, tokenizer_dir
):
    drive.settings.steps = 1
    environment = CalculatorSettings(terms=2, max_number=9, max_turns=3)
    stops = SamplingSettings(extra_body={"stop": ["!"]})
    drive.settings.train.source = [frozen(endpoint, environment=environment, group_size=1, sampling=stops)]
    trainer.row_tokens = 512
    endpoint.says = lambda messages, seed: "7" if len(messages) > 3 else "<calc>2*3</calc>"
    await drive()
    arrays, tokenizer = trainer.batches[1].samples[0].arrays(), ChatTokenizer(tokenizer_dir)
    assert tokenizer.decode(arrays.token_ids[arrays.loss_mask].tolist()) == "<calc>2*3</calc>7"
    text = tokenizer.decode(arrays.token_ids.tolist())
    assert text.endswith("<calc>2*3</calc><|end|><|user|>6<|end|><|assistant|>7")


@pytest.mark.parametrize("fault", [429, 500, 503])
async def test_busy_endpoint_is_asked_again(fault: int, mixed: Drive, endpoint: FakeEndpoint):
    endpoint.faults = [fault] * 2
    (row,) = await mixed()
    assert row["rollout/error_rate"] == pytest.approx(2 / (2 + 4 + 2))


async def test_endpoint_that_fails_every_time_is_named(mixed: Drive, endpoint: FakeEndpoint):
    endpoint.faults = [500] * 100
    mixed.settings.request_attempts = 2
    with pytest.raises(
        RolloutFailedError,
        match=rf"rollout books/1/\d/\d: 2 attempts failed .*frozen generator {endpoint.url}",
    ):
        await mixed()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"finish_reason": "content_filter"}, "finish_reason 'content_filter' with content of type str"),
        ({"says": lambda messages, seed: None}, "finish_reason 'stop' with content of type NoneType"),
        ({"says": lambda messages, seed: 7}, "the answer cannot be read"),
    ],
)
async def test_answer_that_is_no_text_stops_the_run(change, text: str, mixed: Drive, endpoint: FakeEndpoint):
    for name, value in change.items():
        setattr(endpoint, name, value)
    with pytest.raises(AnswerError, match=rf"frozen generator {endpoint.url}: rollout books.*{text}"):
        await mixed()


async def test_key_comes_from_the_environment(mixed: Drive, endpoint: FakeEndpoint, monkeypatch):
    endpoint.key = "sesame"
    with pytest.raises(PeerRefusedError, match="401 no key"):
        await mixed()
    mixed.settings.train.source[1] = frozen(endpoint, api_key_env="TEACHER_KEY")
    with pytest.raises(ValueError, match="api_key_env = 'TEACHER_KEY', but no such environment variable"):
        await mixed()
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    assert len(await mixed()) == 1


async def test_trainer_that_knows_no_objectives_is_refused(mixed: Drive, trainer: FakeTrainer):
    trainer.full_scores = None
    with pytest.raises(PeerMismatchError, match=r"knows no objectives, but source 'books' trains by cross"):
        await mixed()


def lines_of(drive: Drive, step: int = 1) -> list[str]:
    (path,) = (drive.settings.output_dir / "rollouts").glob(f"step-{step:06d}-*.jsonl")
    return path.read_text().splitlines()


async def test_effective_sampling_is_recorded_with_every_rollout(
    mixed: Drive, trainer: FakeTrainer, endpoint: FakeEndpoint, inference: FakeInference
):
    await mixed()
    lines = [json.loads(line) for line in lines_of(mixed)]
    samples = trainer.batches[1].samples
    assert [line["sample_id"] for line in lines] == [sample.sample_id for sample in samples]
    for line, sample in zip(lines, samples, strict=True):
        arrays = sample.arrays()
        assert line["tokens"] == int(np.count_nonzero(arrays.loss_mask))
        if line["source"] == "letters":
            *_, prompt, index = line["sample_id"].split("/")
            (asked,) = [r for r in inference.requests if r["request_id"].endswith(f"-1-{prompt}-1")]
            assert line["sampling"].pop("seed") == asked["sampling_params"]["seed"] + int(index)
            assert line["sampling"] == {
                "temperature": 0.7,
                "top_p": 0.97,
                "top_k": 512,
                "min_p": 0.0,
                "max_tokens": 12,
                "truncates": True,
            }
            assert line["weight_versions"] == [0]
            assert line["generator"] == "policy"
        else:
            assert line["generator"] == f"frozen generator {endpoint.url}, model teacher"
            assert line["sampling"].pop("seed") in {body["seed"] for body in endpoint.chats}
            assert line["sampling"] == {
                "top_p": 0.9,
                "temperature": 0.0,
                "max_tokens": 7,
                "truncates": False,
            }


@pytest.mark.filterwarnings("ignore:.*top_k. sets no bound:keptset_settings.SettingsWarning")
async def test_recorded_sampling_is_what_was_sent_and_nothing_that_was_not(
    mixed: Drive, inference: FakeInference, endpoint: FakeEndpoint
):
    """Defaults of the policy are there, with the rest of the context as max_tokens; a frozen generator's are
    up to it, and so are not.
    """
    mixed.settings.train.sampling = SamplingSettings(extra_body={"stop": ["zz"], "min_tokens": 2})
    mixed.settings.train.source[1].sampling = SamplingSettings(extra_body={"reasoning_effort": "low"})
    await mixed()
    for line in map(json.loads, lines_of(mixed)):
        *_, prompt, index = line["sample_id"].split("/")
        recorded = line["sampling"]
        truncates = recorded.pop("truncates")
        if line["source"] == "letters":
            (asked,) = [r for r in inference.requests if r["request_id"].endswith(f"-1-{prompt}-1")]
            sent = dict(asked["sampling_params"])
            assert (sent.pop("n"), sent.pop("logprobs")) == (4, 0)
            assert recorded == {**sent, "seed": sent["seed"] + int(index)}
            assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (1.0, 1.0, 512, 0.0)
            assert sent["max_tokens"] == inference.max_model_len - len(asked["token_ids"])
            assert (sent["stop"], sent["min_tokens"], truncates) == (["zz"], 2, True)
        else:
            (sent,) = [body for body in endpoint.chats if body["seed"] == recorded["seed"]]
            assert recorded == {k: v for k, v in sent.items() if k not in ("model", "messages")}
            assert recorded.keys() == {"seed", "reasoning_effort"}
            assert not truncates
