"""A peer that is replaced by another one while the run goes on: the run stops and says what is other."""

import asyncio

import pytest

from kept_tokens.answers import GenerateAnswer
from keptset_orchestrator import OrchestratorError, PeerMismatchError
from keptset_orchestrator.trainer import OtherBatchError

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer

OTHER_SERVERS = [
    ({"vocab_size": 300}, "has a vocabulary of 300, trainer .* one of 261"),
    ({"model": "other"}, "came back with model 'other'; when the run began it ran 'fake'"),
    ({"max_model_len": 20}, "does not fit the inference servers' max_model_len of 20"),
    (
        {"capture": {"enabled": False, "kind": "off", "width": None, "proven": False}},
        "does not capture kept sets",
    ),
]


@pytest.mark.parametrize(("changes", "text"), OTHER_SERVERS, ids=lambda value: "-".join(value)[:15])
async def test_server_that_was_killed_and_comes_back_as_another_stops_the_run(
    changes: dict, text: str, drive: Drive, inference: FakeInference, second: FakeInference
):
    """Although another one is there, which could go on."""
    drive.settings.steps, drive.settings.train.prompts_per_step = 1000, 4
    inference.delay = second.delay = 0.05

    async def replace() -> None:
        while not any("-text-2-" in body["request_id"] for body in second.requests):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(second.kill)
        second.restarted()
        for name, value in changes.items():
            setattr(second, name, value)
        await asyncio.to_thread(second.start_again)

    with pytest.raises(OrchestratorError, match=text):
        await asyncio.gather(drive(), replace())
    assert second.posted[:2] == [0, 1]


@pytest.mark.parametrize("at", ["answer", "update"])
async def test_server_that_was_replaced_between_two_requests_is_noticed(
    at: str, drive: Drive, inference: FakeInference
):
    """By an answer with the weights of its start, or as it says who has loaded new ones."""

    def replaced(answer: GenerateAnswer) -> GenerateAnswer:
        inference.restarted()
        inference.model = "other"
        return answer

    if at == "answer":
        inference.forgets = [1]
        inference.delay_of = lambda _: setattr(inference, "model", "other") or 0.0
    else:
        inference.tamper = replaced
    text = "came back with model 'other'; when the run began it ran 'fake'"
    with pytest.raises(PeerMismatchError, match=rf"{inference.url} {text}"):
        await drive()
    assert inference.posted == [0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "other"), ("vocab_size", 300), ("row_tokens", 100), ("full_scores", True), ("unsafe", True)],
)
async def test_trainer_that_was_replaced_gets_no_batch(
    name: str, value: object, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.steps = 40
    told = {"full_scores": "full_vocabulary_scores", "unsafe": "unsafe_ignore_kept_tokens"}.get(name, name)

    async def replace() -> None:
        while 2 not in trainer.batches:
            await asyncio.sleep(0.005)
        setattr(trainer, name, value)

    with pytest.raises(
        PeerMismatchError,
        match=rf"trainer {trainer.url} was replaced while the run went on: its {told} is {value!r}",
    ):
        await asyncio.gather(drive(), replace())
    assert len(trainer.batches) < 40


async def test_trainer_that_remembers_nothing_is_refused_by_the_step_that_it_wants(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    """One of the same model, with another output_dir."""
    drive.settings.steps = 40
    inference.holds = lambda body: "-text-3-" in body["request_id"]

    async def replace() -> None:
        while not any(map(inference.holds, inference.requests)):
            await asyncio.sleep(0.005)
        trainer.batches.clear()
        inference.holds = lambda body: False

    with pytest.raises(OtherBatchError, match=rf"trainer {trainer.url}: batch of step 3: 409"):
        await asyncio.gather(drive(), replace())
