"""Peers that fail in mid-run: what is tried again, what stops the run, what is said."""

import asyncio
import math
import time

import pytest

from keptset_orchestrator import (
    PeerMismatchError,
    PeerRefusedError,
    PeerUnavailableError,
    RolloutFailedError,
    training_time,
)
from keptset_orchestrator.training_time import TrainingTime

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .test_training_time import Clock


@pytest.mark.parametrize("fault", [429, 500, 503, "reset"])
async def test_failed_attempt_is_repeated_and_counted(
    fault: str | int, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.steps = 1
    await drive()
    undisturbed = trainer.batches[1].content_hash
    inference.reset()
    trainer.reset()
    inference.faults = [fault, fault]
    (row,) = await drive()
    assert row["rollout/error_rate"] == 0.5
    assert drive.progress.failed_requests == 2
    assert trainer.batches[1].content_hash == undisturbed, "the same request again gives the same rollouts"
    assert len({body["request_id"] for body in inference.requests}) == 4, "each attempt has its own id"


async def test_client_error_is_never_repeated(drive: Drive, inference: FakeInference, trainer: FakeTrainer):
    inference.faults = [400]
    drive.settings.max_concurrent_requests = 1
    with pytest.raises(
        PeerRefusedError,
        match=rf"server {inference.url}: request \S+-reverse-text-1-0-1 .*400 told to answer 400",
    ):
        await drive()
    assert len(inference.requests) == 1
    assert trainer.puts == []


async def test_group_that_fails_every_time_stops_the_run(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    # prime-rl#2960: slow rollouts discarded as stale: the hard problems starve
    inference.faults = [500] * 100
    drive.settings.request_attempts = 2
    with pytest.raises(RolloutFailedError, match=r"group reverse-text/1/\d: 2 attempts failed .*500 told to"):
        await drive()
    assert len(inference.requests) <= 4
    assert trainer.puts == []


async def test_request_that_hangs_is_given_up_by_name(drive: Drive, inference: FakeInference):
    inference.faults = ["hang"] * 100
    drive.settings.request_timeout = 0.2
    drive.settings.request_attempts = 1
    with pytest.raises(
        RolloutFailedError,
        match=rf"{inference.url}: request \S+-1 \(source reverse-text\): no answer within 0.2 s",
    ):
        await drive()


async def test_slow_answer_in_time_is_no_failure(drive: Drive, inference: FakeInference):
    inference.faults = [0.3]
    assert (await drive())[0]["rollout/error_rate"] == 0.0


async def test_second_attempt_goes_to_another_server(
    drive: Drive, inference: FakeInference, second: FakeInference
):
    drive.settings.steps = 1
    drive.settings.train.prompts_per_step = 1
    drive.settings.request_attempts = 2
    inference.faults = [500] * 100
    await drive()
    assert (len(inference.requests), len(second.requests)) == (1, 1)


async def test_requests_go_to_the_least_loaded_server(
    drive: Drive, inference: FakeInference, second: FakeInference
):
    drive.settings.steps = 1
    drive.settings.train.prompts_per_step = 12
    drive.settings.max_concurrent_requests = 4
    inference.delay = 1.0
    await drive()
    assert 0 < len(inference.requests) < len(second.requests)


async def test_server_killed_in_mid_rollout_is_waited_for_and_gets_its_weights(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    inference.holds = lambda body: "reverse-text-2-" in body["request_id"]

    async def restart():
        while not any(map(inference.holds, inference.requests)):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(inference.kill)
        inference.holds = lambda body: False
        inference.restarted()  # it comes back as it was started
        await asyncio.to_thread(inference.start_again)

    rows, _ = await asyncio.gather(drive(), restart())
    assert [row["rollout/error_rate"] > 0 for row in rows] == [False, True, False]
    assert inference.posted == [0, 1, 1, 2, 3]
    assert trainer.puts == [1, 2, 3]


async def test_server_that_comes_back_without_capture_stops_the_run(drive: Drive, inference: FakeInference):
    inference.faults = ["reset"]
    changed = inference.tamper

    def lose_capture(answer):
        inference.capture["proven"] = False
        return changed(answer)

    inference.tamper = lose_capture
    drive.settings.max_concurrent_requests = 2
    inference.faults = [0.0, "reset"]
    with pytest.raises(PeerMismatchError, match="does not capture"):
        await drive()


async def test_server_that_stays_away_is_named(drive: Drive, inference: FakeInference):
    inference.holds = lambda body: True
    drive.settings.startup_timeout = drive.settings.weights_timeout = 2.0

    async def stop():
        while not inference.requests:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(inference.kill)

    with pytest.raises(PeerUnavailableError, match=rf"{inference.url} did not become healthy within 2 s"):
        await asyncio.gather(drive(), stop())


async def test_run_goes_on_with_the_servers_that_are_left(
    drive: Drive, inference: FakeInference, second: FakeInference
):
    drive.settings.train.prompts_per_step = 6
    second.holds = lambda body: True  # what it was asked, the other one samples

    async def stop():
        while not second.requests:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(second.kill)

    drive.settings.startup_timeout = drive.settings.weights_timeout = 2.0
    await asyncio.gather(drive(), stop())
    assert len(inference.requests) == 18, "all groups were sampled"
    assert inference.posted == [0, 1, 2, 3]


@pytest.mark.parametrize("code", [404, 409, 422, 500])
async def test_weights_that_a_server_cannot_load_stop_the_run(
    code: int, drive: Drive, inference: FakeInference
):
    inference.weights_faults = [code]
    with pytest.raises(
        (PeerRefusedError, PeerUnavailableError),
        match=rf"{inference.url}.* load weights version 0.*{code} told to answer {code}",
    ):
        await drive()
    assert inference.requests == []


async def test_weights_that_load_for_ever_name_the_server(drive: Drive, inference: FakeInference):
    drive.settings.weights_timeout = 0.2
    inference.weights_faults = ["hang"]
    with pytest.raises(
        PeerUnavailableError, match=rf"{inference.url} did not load weights version 0 .*0.2 s"
    ):
        await drive()


@pytest.mark.parametrize("fault", [503, "reset"])
async def test_weights_are_posted_again_after_a_lost_connection(
    fault: int | str, drive: Drive, inference: FakeInference
):
    inference.weights_faults = [fault]
    assert len(await drive()) == 3
    assert inference.posted == [0, 1, 2, 3]


@pytest.mark.parametrize("code", [413, 422])
async def test_batch_that_the_trainer_refuses_stops_the_run(code: int, drive: Drive, trainer: FakeTrainer):
    trainer.put_faults = [code]
    with pytest.raises(PeerRefusedError, match=rf"trainer {trainer.url}: batch of step 1: {code} told to"):
        await drive()
    assert trainer.puts == [1]


async def test_batch_is_put_again_after_a_server_error(drive: Drive, trainer: FakeTrainer):
    trainer.put_faults = [503, 507]
    trainer.lose_answers = 1
    assert len(await drive()) == 3
    assert trainer.puts == [1, 1, 1, 1, 2, 3]


async def test_batch_that_finds_no_room_is_sent_again_as_long_as_a_step_may_take(
    drive: Drive, trainer: FakeTrainer
):
    trainer.full = 3
    drive.settings.startup_timeout = 0.5  # 0.1 + 0.2 + 0.4 s of pauses are more
    assert len(await drive()) == 3
    assert trainer.puts == [1, 1, 1, 1, 2, 3]


async def test_trainer_that_has_no_room_for_a_whole_steps_time_is_named(drive: Drive, trainer: FakeTrainer):
    trainer.full = math.inf
    drive.settings.step_timeout = 0.3
    full = rf"trainer {trainer.url}: batch of step 1: 429 step 1: 64 batches wait to be trained"
    waited = rf"{full} \(waited 0.3 s for it to be done with no step that it names\)"
    with pytest.raises(PeerUnavailableError, match=waited):
        await drive()
    trainer.busy_with = [7] * 1000
    with pytest.raises(PeerUnavailableError, match=rf"{full} \(waited 0.3 s for it to be done with step 7\)"):
        await drive()


async def test_batch_finds_room_after_steps_that_are_trained_once_more_and_have_their_time_each(
    drive: Drive, trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
):
    trainer.busy_with = list(range(-5, 1))  # two of them to the looks at the start
    drive.settings.step_timeout, clock, see = 10, Clock(), TrainingTime.see

    def seen_later(time_left: TrainingTime, step: int | None) -> None:
        clock.now += 0.9 * drive.settings.step_timeout
        see(time_left, step)

    monkeypatch.setattr(training_time, "time", clock)
    monkeypatch.setattr(TrainingTime, "see", seen_later)
    assert len(await drive()) == 3
    assert clock.now > 3 * drive.settings.step_timeout


async def test_batch_does_not_wait_without_end_for_a_trainer_that_starts_again_and_again(
    drive: Drive, trainer: FakeTrainer
):
    trainer.busy_with = [-2, -1, 0] * 1000
    drive.settings.step_timeout = 0.3
    with pytest.raises(PeerUnavailableError, match=r"\(waited 0.3 s for it to be done with step"):
        await drive()


async def test_trainer_that_starts_again_after_it_had_no_room_for_long_has_time_to_start(
    drive: Drive, trainer: FakeTrainer
):
    trainer.full, trainer.put_faults = 5, [503, 503]
    drive.settings.startup_timeout = 3.0  # 0.1 + 0.2 + 0.4 + 0.8 + 1.6 s of pauses are more
    assert len(await drive()) == 3
    assert trainer.puts == [1] * 8 + [2, 3]


async def test_result_is_asked_for_again_after_a_server_error(drive: Drive, trainer: FakeTrainer):
    trainer.get_faults = [503, 500]
    assert len(await drive()) == 3


async def test_step_that_takes_too_long_names_the_trainer(drive: Drive, trainer: FakeTrainer):
    trainer.hold_from = 1
    drive.settings.step_timeout = 2
    with pytest.raises(
        PeerUnavailableError, match=rf"trainer {trainer.url} did not finish step 1 within 2 s"
    ):
        await drive()


async def test_step_that_waits_for_ranks_that_are_away_says_so(drive: Drive, trainer: FakeTrainer):
    trainer.hold_from, trainer.waits_for = 1, "no sign of life from external ranks for 61 s"
    drive.settings.step_timeout = 2
    with pytest.raises(
        PeerUnavailableError, match=r"did not finish step 1 within 2 s: no sign of life from external ranks"
    ):
        await drive()


async def test_steps_that_are_trained_once_more_have_their_time_each(drive: Drive, trainer: FakeTrainer):
    """A trainer that was started again is at earlier ones first; all of them take longer than one may."""
    trainer.again, trainer.seconds_again = list(range(-8, 1)), 0.5
    drive.settings.step_timeout, drive.settings.steps = 2, 1
    began = time.monotonic()
    rows = await drive()
    assert [row["step"] for row in rows] == [1]
    assert time.monotonic() - began > 2


async def test_trainer_that_starts_again_and_again_is_not_waited_for_without_end(
    drive: Drive, trainer: FakeTrainer
):
    trainer.again, trainer.seconds_again = [-2, -1, 0] * 1000, 0.1
    drive.settings.step_timeout = 1
    with pytest.raises(PeerUnavailableError, match="did not finish step 1 within 1 s"):
        await drive()


async def test_trainer_that_forgets_an_accepted_step_stops_the_run(drive: Drive, trainer: FakeTrainer):
    trainer.get_faults = [404]
    with pytest.raises(PeerRefusedError, match=rf"trainer {trainer.url}: result of step 1: 404"):
        await drive()


async def test_trainer_killed_in_mid_step_is_waited_for(drive: Drive, trainer: FakeTrainer):
    trainer.hold_from = 1

    async def restart():
        while not trainer.batches:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(trainer.kill)
        await asyncio.sleep(0.2)
        trainer.hold_from = math.inf
        await asyncio.to_thread(trainer.start_again)

    rows, _ = await asyncio.gather(drive(), restart())
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sorted(trainer.batches) == [1, 2, 3]
    assert trainer.puts in ([1, 2, 3], [1, 1, 2, 3]), "the answer to the first may have been lost"


async def test_result_with_other_weights_than_its_steps_stops_the_run(drive: Drive, trainer: FakeTrainer):
    trainer.version_off = -1
    with pytest.raises(PeerMismatchError, match=rf"{trainer.url}: step 1 published weights version 0"):
        await drive()
