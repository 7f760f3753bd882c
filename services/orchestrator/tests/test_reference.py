"""Distillation and the KL penalty: who is asked to score what, and what becomes of the scores."""

import numpy as np
import pytest

from keptset_orchestrator import AnswerError, ChatTokenizer, OrchestratorError, PeerMismatchError
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.reference import of_sampled_tokens
from keptset_settings import (
    CalculatorSettings,
    EndpointSettings,
    GrpoAlgorithm,
    OpdAlgorithm,
    OpsdAlgorithm,
    SamplingSettings,
    ZeroAdvantageFilter,
)

from .driving import Drive
from .fake_endpoint import FakeEndpoint, logprob_of
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer


@pytest.fixture
def distilling(drive: Drive, endpoint: FakeEndpoint) -> Drive:
    """One step of opd without truncation."""
    drive.settings.steps = 1
    drive.settings.train.sampling = SamplingSettings(temperature=1.0, max_tokens=12, seed=3)
    drive.settings.train.algorithm = OpdAlgorithm()
    drive.settings.train.reference = EndpointSettings(url=endpoint.url, model="teacher")
    return drive


def test_scores_of_context_between_turns_are_left_out():
    sampled = np.array([True, False, True])
    said = Completion(np.int32([7, 8, 9]), np.zeros(3, np.float32), None, "stop", None, [], sampled)
    scores = np.float32([0, -1, -2, -3, -4])
    assert of_sampled_tokens(scores, [5, 6], said).tolist() == [-2, 0, -4]


def scores_of(sample) -> np.ndarray:
    ids = sample.arrays().token_ids.tolist()
    scores = np.float32([logprob_of(position, token) for position, token in enumerate(ids)])
    return np.where(sample.arrays().loss_mask, scores, np.float32(0))


async def test_reference_scores_prompt_and_rollout_as_ids(
    distilling: Drive, endpoint: FakeEndpoint, trainer: FakeTrainer
):
    await distilling()
    assert len(endpoint.scored) == 8
    sent = sorted(body["prompt"] for body in endpoint.scored)
    assert sent == sorted(s.arrays().token_ids.tolist() for s in trainer.batches[1].samples)
    assert {body["model"] for body in endpoint.scored} == {"teacher"}


async def test_advantage_of_a_token_is_log_reference_over_policy(distilling: Drive, trainer: FakeTrainer):
    await distilling()
    for sample in trainer.batches[1].samples:
        arrays = sample.arrays()
        expected = np.where(arrays.loss_mask, scores_of(sample) - arrays.logprobs, 0)
        np.testing.assert_allclose(arrays.advantages, expected, rtol=1e-6)
        assert sample.reference() is None, "done here: the trainer has nothing to compare"


async def test_trainer_with_full_scores_gets_the_reference_itself(
    distilling: Drive, trainer: FakeTrainer, inference: FakeInference
):
    trainer.full_scores = True
    distilling.settings.train.sampling.top_p = 0.9
    distilling.settings.train.sampling.top_k = 50
    await distilling()
    for sample in trainer.batches[1].samples:
        np.testing.assert_array_equal(sample.reference(), scores_of(sample))
        assert sample.reference_weight == 1.0
        assert not sample.arrays().advantages.any()
        assert sample.must_have_masks


async def test_penalty_is_added_to_the_advantage_of_the_reward(distilling: Drive, trainer: FakeTrainer):
    distilling.settings.train.algorithm = GrpoAlgorithm(reference_kl=0.1)
    await distilling()
    with_penalty = trainer.batches[1].samples
    trainer.reset()
    distilling.settings.train.algorithm = GrpoAlgorithm()
    distilling.settings.output_dir = distilling.settings.output_dir / "again"
    await distilling()
    for penalised, plain in zip(with_penalty, trainer.batches[1].samples, strict=True):
        added = penalised.arrays().advantages - plain.arrays().advantages
        expected = np.where(plain.arrays().loss_mask, 0.1 * (scores_of(plain) - plain.arrays().logprobs), 0)
        np.testing.assert_allclose(added, expected, atol=1e-6)


async def test_penalty_keeps_rollouts_without_advantage(
    distilling: Drive, trainer: FakeTrainer, inference: FakeInference
):
    inference.says = lambda ids, seed: [60, 1]  # the same rollout throughout a group: no advantage
    distilling.settings.train.filter = [ZeroAdvantageFilter()]
    await distilling()
    assert len(trainer.batches[1].samples) == 8


async def test_self_distillation_shows_the_policy_the_solution(
    distilling: Drive, trainer: FakeTrainer, inference: FakeInference, endpoint: FakeEndpoint
):
    distilling.settings.train.algorithm = OpsdAlgorithm(hint="It is {solution}.")
    distilling.settings.train.reference = None
    await distilling()
    tokenizer = ChatTokenizer(distilling.settings.tokenizer)
    assert endpoint.scored == []
    assert len(inference.scored) == 8
    prompts = {tuple(request["token_ids"]) for request in inference.requests}
    for body in inference.scored:
        text = tokenizer.decode(body["prompt"])
        asked, _, said = text.partition("<|end|><|assistant|>")
        question, hint = asked.removeprefix("<|user|>").split("\n")
        assert hint == f"It is {question[::-1]}."
        assert tuple(tokenizer.encode_messages([{"role": "user", "content": question}])) in prompts
        assert any(
            tokenizer.decode(sample.arrays().token_ids[sample.arrays().loss_mask].tolist()) == said
            for sample in trainer.batches[1].samples
        )
    sample = trainer.batches[1].samples[0]
    arrays = sample.arrays()
    shift = len(tokenizer.encode("\nIt is ." + "x" * len(sample_question(tokenizer, sample))))
    ids = enumerate(arrays.token_ids.tolist())
    scores = np.float32([logprob_of(position + shift, token) for position, token in ids])
    expected = np.where(arrays.loss_mask, scores - arrays.logprobs, 0)
    np.testing.assert_allclose(arrays.advantages, expected, rtol=1e-5)


def sample_question(tokenizer: ChatTokenizer, sample) -> str:
    text = tokenizer.decode(sample.arrays().token_ids.tolist())
    return text.removeprefix("<|user|>").partition("<|end|>")[0]


async def test_score_is_looked_up_by_id(distilling: Drive, endpoint: FakeEndpoint, trainer: FakeTrainer):
    """Reported as NeMo-RL#3297: the first entry is the likeliest token, not the one that was sampled."""
    endpoint.change = lambda entries: [entry and {"0": {"logprob": -0.001}, **entry} for entry in entries]
    await distilling()
    sample = trainer.batches[1].samples[0]
    arrays = sample.arrays()
    expected = np.where(arrays.loss_mask, scores_of(sample) - arrays.logprobs, 0)
    np.testing.assert_allclose(arrays.advantages, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entries: entries[:-1], "no prompt_logprobs for each of"),
        (lambda entries: None, "no prompt_logprobs for each of"),
        (lambda entries: [*entries[:-1], {"0": {"logprob": -1.0}}], "has logprob None, which is none"),
        (lambda entries: [*entries[:-1], None], "has logprob None, which is none"),
        (
            lambda entries: [entry and {key: {"logprob": -9999.0} for key in entry} for entry in entries],
            "at position 1 has logprob -9999.0",
        ),
        (lambda entries: [{"x": {"logprob": "?"}}, *entries[1:]], "the answer cannot be read"),
    ],
)
async def test_reference_that_does_not_score_every_token_stops_the_run(
    change, text: str, distilling: Drive, endpoint: FakeEndpoint, trainer: FakeTrainer
):
    endpoint.change = change
    with pytest.raises(AnswerError, match=rf"reference {endpoint.url}: rollout reverse-text.*{text}"):
        await distilling()
    assert trainer.puts == []


@pytest.mark.parametrize("algorithm", [OpdAlgorithm(), OpsdAlgorithm(), GrpoAlgorithm(reference_kl=0.1)])
async def test_truncation_and_a_trainer_without_full_scores_are_refused(
    algorithm, distilling: Drive, trainer: FakeTrainer, inference: FakeInference
):
    distilling.settings.train.sampling.top_k = 50
    distilling.settings.train.algorithm = algorithm
    text = (
        "gives no logprobs over the whole vocabulary, but source 'reverse-text' truncates and compares "
        "with a "
        "reference: set trainer.full_vocabulary_scores = true"
    )
    with pytest.raises(PeerMismatchError, match=text):
        await distilling()
    assert inference.requests == []
    trainer.full_scores = True
    assert len(await distilling()) == 1


async def test_solution_that_leaves_no_room_is_an_error_before_sampling(
    distilling: Drive, inference: FakeInference
):
    distilling.settings.train.algorithm = OpsdAlgorithm(hint="x" * 230 + "{solution}")
    with pytest.raises(OrchestratorError, match=r"with the solution shown .* max_model_len of 256"):
        await distilling()
    assert inference.requests == []


async def test_several_turns_that_may_fill_a_row_must_fit_behind_the_solution_too(
    distilling: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """Else the run stops when the first rollout comes that long, perhaps after many steps."""
    distilling.settings.train.algorithm = OpsdAlgorithm()
    distilling.settings.train.source[0].environment = CalculatorSettings(max_turns=3)
    inference.max_model_len = trainer.row_tokens = 512
    with pytest.raises(OrchestratorError, match=r"solution shown .*: lower trainer.row_tokens or raise max"):
        await distilling()
    assert inference.requests == []
    inference.max_model_len = 512 + 60  # the hint's characters are tokens here, and the end of a message
    assert len(await distilling()) == 1


async def test_max_tokens_left_out_leaves_no_room_for_the_solution(distilling: Drive, inference):
    distilling.settings.train.algorithm = OpsdAlgorithm()
    distilling.settings.train.sampling.max_tokens = None
    with pytest.raises(OrchestratorError, match=r"solution shown .*: set max_tokens or raise max_model_len"):
        await distilling()
    assert inference.requests == []
