"""What is asked of the peers before the first rollout, and what stops the run there."""

import asyncio

import pytest
from pydantic import SecretStr

from keptset_orchestrator import PeerMismatchError, PeerRefusedError, PeerUnavailableError
from keptset_settings import GibberishFilter, SamplingSettings

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer


@pytest.mark.parametrize(
    "capture",
    [
        {"enabled": False, "kind": "v1", "width": 512, "proven": True},
        {"enabled": True, "kind": "off", "width": None, "proven": True},
        {"enabled": True, "kind": "v1", "width": 512, "proven": False},
    ],
)
async def test_truncating_source_and_server_without_capture_are_refused(
    capture: dict, drive: Drive, inference: FakeInference
):
    inference.capture = capture
    with pytest.raises(
        PeerMismatchError,
        match=rf"inference server {inference.url} does not capture .*source 'reverse-text' truncates",
    ):
        await drive()
    assert inference.requests == []
    assert inference.posted == []


async def test_capture_narrower_than_top_k_is_refused(drive: Drive, inference: FakeInference):
    inference.capture["width"] = 256
    with pytest.raises(PeerMismatchError, match=r"captures 256 ids a token, but source .* top_k 512"):
        await drive()


async def test_other_vocabulary_than_the_trainers_is_refused(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    trainer.vocab_size = 300
    with pytest.raises(
        PeerMismatchError,
        match=rf"{inference.url} has a vocabulary of 261, trainer {trainer.url} one of 300",
    ):
        await drive()
    assert inference.requests == []


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("vocab_size", [261, 300])
async def test_ids_without_a_text_are_warned_of_where_nothing_masks_them(
    truncates: bool,
    vocab_size: int,
    drive: Drive,
    inference: FakeInference,
    trainer: FakeTrainer,
    caplog: pytest.LogCaptureFixture,
):
    # vllm#13175, verl#7882: ids beyond the tokenizer were sampled from a padded vocabulary
    inference.vocab_size = trainer.vocab_size = vocab_size
    if not truncates:
        drive.settings.train.sampling = SamplingSettings(temperature=1.0, max_tokens=12)
    assert len(await drive()) == 3
    said = "the model has 300 ids and the tokenizer 261: source reverse-text samples without truncation"
    assert (said in caplog.text) is (vocab_size == 300 and not truncates)


@pytest.mark.parametrize("first", [260, 261])
async def test_filter_for_rare_ids_that_no_id_reaches_is_warned_of(
    first: int, drive: Drive, caplog: pytest.LogCaptureFixture
):
    drive.settings.train.sampling = SamplingSettings(temperature=1.0, max_tokens=12)
    drive.settings.train.filter = [GibberishFilter(min_token_id=first, enforce=False)]
    assert len(await drive()) == 3
    said = "filter of reverse-text flags nothing: it looks at ids from 261 on, and the model has 261"
    assert (said in caplog.text) is (first == 261)


async def test_one_unfit_server_among_others_is_named(drive: Drive, inference: FakeInference):
    other = FakeInference()
    try:
        other.capture["proven"] = False
        drive.settings.inference_urls.append(other.url)
        with pytest.raises(PeerMismatchError, match=other.url):
            await drive()
    finally:
        other.kill()


@pytest.mark.parametrize("who", ["inference", "trainer"])
async def test_peer_that_is_not_healthy_in_time_is_named(
    who: str, drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    drive.settings.startup_timeout = 2.0  # the other peer must answer in this time, on a busy machine too
    peer = {"inference": inference, "trainer": trainer}[who]
    peer.healthy = False
    with pytest.raises(PeerUnavailableError, match=rf"{who}.* {peer.url} .* within 2 s; .*: 503"):
        await drive()


async def test_peer_that_does_not_listen_is_named(drive: Drive, inference: FakeInference):
    drive.settings.startup_timeout = 2.0  # in which the trainer answers
    inference.kill()
    with pytest.raises(PeerUnavailableError, match=rf"inference server {inference.url} .*connection failed"):
        await drive()


async def test_peer_that_becomes_healthy_later_is_waited_for(drive: Drive, inference: FakeInference):
    inference.kill()
    inference.healthy = False

    async def later():
        await asyncio.sleep(0.2)
        await asyncio.to_thread(inference.start_again)
        inference.healthy = True

    rows, _ = await asyncio.gather(drive(), later())
    assert len(rows) == 3


async def test_trainer_that_is_started_again_after_it_was_healthy_is_waited_for(
    drive: Drive, trainer: FakeTrainer
):
    """Its status has no vocabulary while it loads."""
    trainer.vocab_size = None

    async def later():
        await asyncio.sleep(0.5)
        trainer.vocab_size = 261

    rows, _ = await asyncio.gather(drive(), later())
    assert len(rows) == 3


async def test_swapped_addresses_are_noticed(drive: Drive, inference: FakeInference, trainer: FakeTrainer):
    drive.settings.inference_urls, drive.settings.trainer_url = [trainer.url], inference.url
    with pytest.raises(PeerMismatchError, match="not that of a Keptset trainer"):
        await drive()


async def test_api_key_opens_the_inference_server(drive: Drive, inference: FakeInference):
    inference.api_key = "sesame"
    with pytest.raises(PeerRefusedError, match=rf"{inference.url}: status: 401 no key"):
        await drive()
    drive.settings.inference_api_key = SecretStr("sesame")
    assert len(await drive()) == 3


async def test_a_server_that_carries_the_number_is_asked_whether_it_is_the_same(
    drive: Drive, inference: FakeInference
):
    """Version 0 of an earlier run, say; only the server can compare, and equal ones cost it nothing."""
    inference.weight_version = 0
    await drive()
    assert inference.posted == [0, 1, 2, 3]
