"""Several turns: ids stay as they were sampled, and masks, logprobs and versions stay with them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_tokens import KeptTokens
from keptset_orchestrator import Calculator, ChatTokenizer
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.turns import follow
from keptset_settings import CalculatorSettings, SourceSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .small_tokenizer import END, write_tokenizer


@st.composite
def turns(draw, masked: bool) -> Completion:
    rows = draw(st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=6))
    return Completion(
        np.array([min(row) for row in rows], np.int32),
        -np.arange(1, len(rows) + 1, dtype=np.float32),
        KeptTokens.from_rows([sorted(row) for row in rows]) if masked else None,
        "stop",
        None,
        [(3, 0, len(rows))],
    )


@settings(max_examples=50)
@given(st.data(), st.booleans())
def test_context_has_no_masks_and_turns_keep_theirs(data: st.DataObject, masked: bool):
    said = data.draw(st.lists(turns(masked), min_size=1, max_size=4))
    contexts = [data.draw(st.lists(st.integers(0, 40), max_size=4)) for _ in said[1:]]
    rollout = said[0]
    for context, turn in zip(contexts, said[1:], strict=True):
        rollout = follow(rollout, context, turn)
    at = 0
    for index, turn in enumerate(said):
        here = slice(at, at + len(turn.token_ids))
        assert rollout.token_ids[here].tolist() == turn.token_ids.tolist()
        assert rollout.logprobs[here].tolist() == turn.logprobs.tolist()
        assert rollout.is_sampled[here].all()
        assert rollout.weight_versions[index] == (3, here.start, here.stop)
        if masked:
            assert rollout.kept.slice(here.start, here.stop) == turn.kept
        at = here.stop
        if index < len(contexts):
            between = slice(at, at + len(contexts[index]))
            assert rollout.token_ids[between].tolist() == contexts[index]
            assert not rollout.is_sampled[between].any()
            assert not rollout.logprobs[between].any()
            if masked:
                assert not rollout.kept.counts[between].any()
            at = between.stop
    assert at == len(rollout.token_ids)
    if len(said) == 1 or contexts[-1]:
        assert rollout.last_turn() == said[-1].token_ids.tolist()


def test_masks_come_with_all_turns_or_none():
    one = Completion(np.array([1], np.int32), np.float32([-1]), None, "stop", None, [(0, 0, 1)])
    masked = Completion(one.token_ids, one.logprobs, KeptTokens.from_rows([[1]]), "stop", None, [(0, 0, 1)])
    with pytest.raises(ValueError, match="masks in all of its turns or in none"):
        follow(masked, [2], one)


HALF = 132
"""The id of the first byte of a letter of two, which alone is no character."""

REPLY = [{"role": "user", "content": "42"}]


def test_reply_ends_the_turn_once(tokenizer_dir):
    tokenizer = ChatTokenizer(tokenizer_dir)
    assert tokenizer.decode(tokenizer.encode_reply(END, REPLY)) == "<|user|>42<|end|><|assistant|>"
    assert tokenizer.decode(tokenizer.encode_reply(7, REPLY)) == "<|end|><|user|>42<|end|><|assistant|>"


def test_reply_is_what_the_template_makes_of_the_whole_conversation(tokenizer_dir):
    tokenizer = ChatTokenizer(tokenizer_dir)
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    turn = {"role": "assistant", "content": "<calc>6*7</calc>"}
    by_hand = [*tokenizer.encode_messages(first), *tokenizer.encode("<calc>6*7</calc>"), END]
    whole = tokenizer.encode_messages([*first, turn, *REPLY])
    assert [*by_hand, *tokenizer.encode_reply(END, REPLY)] == whole


def test_template_that_hides_earlier_turns_is_refused(tmp_path):
    directory = write_tokenizer(tmp_path)
    hiding = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(hiding)
    with pytest.raises(ValueError, match="drops or changes what the assistant said before"):
        ChatTokenizer(directory).encode_reply(END, REPLY)


@pytest.fixture
def calculating(drive: Drive, inference: FakeInference, trainer: FakeTrainer, tokenizer_dir) -> Drive:
    """One step of 1 x 2 rollouts of three turns; the second is not what its text encodes to."""
    tokenizer = ChatTokenizer(tokenizer_dir)
    odd = [HALF, *tokenizer.encode("<calc>6+1</calc>")]
    assert tokenizer.encode(tokenizer.decode(odd)) != odd

    def says(token_ids: list[int], seed: int) -> list[int]:
        turn = token_ids.count(4)  # marks of the assistant's turns
        said = {1: tokenizer.encode("<calc>2*3</calc>"), 2: odd, 3: tokenizer.encode("7")}[turn]
        return [*said, END]

    inference.says = says
    inference.max_model_len = trainer.row_tokens = 512
    drive.settings.train.sampling.max_tokens = 20  # the calculator's calls have 17
    drive.settings.steps = 1
    drive.settings.train.prompts_per_step = 1
    drive.settings.train.group_size = 2
    drive.settings.train.source = [
        SourceSettings(name="calc", environment=CalculatorSettings(terms=2, max_number=9, max_turns=3))
    ]
    return drive


async def test_prefix_of_the_next_prompt_is_the_ids_so_far(
    calculating: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """Reported as trl#5224, verl#6719: encoded again between turns, ids drift off their masks."""
    await calculating()
    first, *later = inference.requests
    assert (first["sampling_params"]["n"], len(later)) == (2, 4)
    for request in later:
        assert request["sampling_params"]["n"] == 1
        assert request["kept_tokens"] is True
    for sample in trainer.batches[1].samples:
        whole = sample.arrays().token_ids.tolist()
        prompts = [r["token_ids"] for r in later if r["token_ids"] == whole[: len(r["token_ids"])]]
        lengths = sorted({len(first["token_ids"]), *map(len, prompts)})
        assert len(lengths) == 3, "each prompt is a prefix of what is trained on"
        trained = sample.arrays().loss_mask
        for length in lengths:
            assert not trained[length - 1]
            assert trained[length]
    ids = trainer.batches[1].samples[0].arrays().token_ids.tolist()
    assert HALF in ids[len(first["token_ids"]) :], "an id that its text would not encode to"


async def test_context_between_turns_has_count_0_and_no_loss(
    calculating: Drive, trainer: FakeTrainer, tokenizer_dir
):
    await calculating()
    tokenizer = ChatTokenizer(tokenizer_dir)
    for sample in trainer.batches[1].samples:
        arrays, kept = sample.arrays(), sample.kept()
        assert ((kept.counts > 0) == arrays.loss_mask).all()
        assert not arrays.advantages[~arrays.loss_mask].any()
        between = tokenizer.decode(arrays.token_ids[~arrays.loss_mask].tolist())
        assert between.endswith("<|user|>6<|end|><|assistant|><|user|>7<|end|><|assistant|>")
        assert len(sample.weight_versions) == 3


async def test_reward_is_that_of_the_last_turn(calculating: Drive, trainer: FakeTrainer, inference):
    """Seven, whatever was asked: some of many expressions of one-digit numbers have that value."""
    calculating.settings.train.prompts_per_step = 40
    (row,) = await calculating()
    assert 0 < row["reward/mean"] < 1
    assert row["rollout/tokens"] == sum(sum(sample.loss_mask) for sample in trainer.batches[1].samples)


@pytest.mark.parametrize(("room", "requests"), [(40, 1), (41, 1 + 2)])
async def test_rollout_ends_before_a_turn_that_might_not_fit(
    calculating: Drive, inference: FakeInference, trainer: FakeTrainer, room: int, requests: int
):
    calculator = Calculator(2, 9, 3)
    asked = calculator.messages(next(calculator.examples(calculating.settings.seed, 0)))
    prompt = len(ChatTokenizer(calculating.settings.tokenizer).encode_messages(asked))
    trainer.row_tokens = prompt + room  # 17 of the first turn, 4 of its answer, and room for 20 more or none
    (row,) = await calculating()
    assert len(inference.requests) == requests
    assert row["rollout/truncated_share"] == 1.0
    assert all(s.num_tokens <= trainer.row_tokens for s in trainer.batches[1].samples)


async def test_turns_have_seeds_of_their_own(calculating: Drive, inference: FakeInference):
    await calculating()
    seeds = [request["sampling_params"]["seed"] for request in inference.requests]
    assert len(set(seeds)) == len(seeds) == 5
    assert len({request["request_id"] for request in inference.requests}) == 5
