"""The HTTP API over a directory, with the training loop played by the test."""

import asyncio
import errno
import json
import os
import subprocess
import sys

import pytest

from kept_tokens.messages import StepResult, TrainingBatch, TrainingSample, decode, encode
from keptset_trainer import app as app_module
from keptset_trainer import spool as spool_module
from keptset_trainer.spool import Spool

from .played_loop import PlayedLoop, client, client_of, folders, loop, trained

__all__ = ["client", "folders", "loop"]  # fixtures


async def test_a_batch_is_on_the_disk_before_it_is_acknowledged(client, folders, make_batch):
    body = encode(make_batch(1))
    answer = await client.put("/keptset/v1/steps/1", content=body)
    assert answer.status_code == 202
    assert folders.batch(1).read_bytes() == body
    assert [p.name for p in folders.spool.iterdir()] == ["step-000001.msgpack"]
    assert list(answer.json()["seconds"]) == ["receive", "check", "spool"]


async def test_what_is_renamed_into_place_was_forced_to_the_disk_before(
    client, folders, make_batch, monkeypatch
):
    forced = []

    def note(path):
        forced.append((path.is_dir(), folders.batch(1).exists()))

    monkeypatch.setattr(spool_module, "fsync_path", note)
    await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    assert forced == [(False, False), (True, True)], "first the file, then its name"


async def test_the_same_batch_again_is_fine_and_another_one_is_a_conflict(client, folders, make_batch):
    batch = make_batch(1)
    await client.put("/keptset/v1/steps/1", content=encode(batch))
    assert (await client.put("/keptset/v1/steps/1", content=encode(batch))).status_code == 200
    other = TrainingBatch.build(1, make_batch(2).samples)
    answer = await client.put("/keptset/v1/steps/1", content=encode(other))
    assert answer.status_code == 409
    assert answer.json()["content_hash"] == batch.content_hash.hex()
    assert answer.json()["step"] == 1
    assert answer.json()["next_step"] == 2
    assert folders.batch(1).read_bytes() == encode(batch)


async def test_a_step_out_of_order_is_told_which_one_is_next(client, make_batch):
    answer = await client.put("/keptset/v1/steps/3", content=encode(make_batch(3)))
    assert answer.status_code == 409
    assert answer.json()["next_step"] == 1
    assert "the next step is 1" in answer.json()["error"]["message"]
    assert answer.json()["content_hash"] is None


async def test_a_result_is_given_in_both_forms_bit_for_bit(client, folders, make_batch):
    batch = make_batch(1)
    await client.put("/keptset/v1/steps/1", content=encode(batch))
    trained(folders, batch)
    answer = await client.get("/keptset/v1/steps/1", params={"wait": 30})
    assert answer.json() == {
        "step": 1,
        "weight_version": 1,
        "metrics": {"loss": 0.1 + 0.2, "seconds/train": 1.5},
    }
    packed = await client.get("/keptset/v1/steps/1", headers={"accept": "application/msgpack"})
    assert decode(packed.content, StepResult) == StepResult(1, 1, {"loss": 0.1 + 0.2, "seconds/train": 1.5})


async def test_the_wait_for_a_result_ends(client, loop, make_batch):
    await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    answer = await client.get("/keptset/v1/steps/1", params={"wait": 0.1})
    assert answer.status_code == 202
    assert answer.json()["state"] == "queued"
    loop.said["training"] = 1
    assert (await client.get("/keptset/v1/steps/1")).json()["state"] == "training"


async def test_a_step_that_was_never_accepted_is_unknown(client):
    answer = await client.get("/keptset/v1/steps/7", params={"wait": 30})
    assert answer.status_code == 404
    assert "the next step is 1" in answer.json()["error"]["message"]


async def test_a_malformed_batch_names_sample_and_position(client, folders, make_batch):
    samples = list(make_batch(1).samples)
    wrong = {name: getattr(samples[4], name) for name in TrainingSample.__struct_fields__}
    wrong["kept_ids"] = (10**6).to_bytes(4, "little") + wrong["kept_ids"][4:]
    samples[4] = TrainingSample(**wrong)
    answer = await client.put("/keptset/v1/steps/1", content=encode(TrainingBatch.build(1, samples)))
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert "sample 4 (id '1/4')" in message
    assert "position" in message
    assert not list(folders.spool.iterdir())


async def test_the_hash_is_checked_on_arrival(client, make_batch):
    batch = make_batch(1)
    damaged = TrainingBatch(1, batch.samples[1:], batch.content_hash)
    answer = await client.put("/keptset/v1/steps/1", content=encode(damaged))
    assert answer.status_code == 422
    assert "content_hash" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x90"])
async def test_what_is_no_batch_is_refused(client, body):
    answer = await client.put("/keptset/v1/steps/1", content=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "invalid_batch"


async def test_a_batch_under_the_wrong_number_is_refused(client, make_batch):
    answer = await client.put("/keptset/v1/steps/1", content=encode(make_batch(2)))
    assert answer.status_code == 422
    assert "says step 2, the address says 1" in answer.json()["error"]["message"].replace(
        "says step 1", "says 1"
    )


async def test_a_sequence_longer_than_a_row_is_refused(folders, loop, make_batch):
    longest = max(s.num_tokens for s in make_batch(1).samples)
    answer = await client_of(folders, loop, row_tokens=longest - 1).put(
        "/keptset/v1/steps/1", content=encode(make_batch(1))
    )
    assert answer.status_code == 422
    assert f"at position {longest - 1}" in answer.json()["error"]["message"]
    assert "trainer.row_tokens" in answer.json()["error"]["message"]


async def test_a_batch_with_nothing_to_train_on_is_refused(client, make_batch):
    sample = make_batch(1).samples[0]
    untrained = TrainingSample.build(
        **sample.arrays()
        ._replace(loss_mask=[0] * sample.num_tokens, logprobs=[0.0] * sample.num_tokens)
        ._asdict(),
        kept=None,
        must_have_masks=False,
        source="",
        group="",
        sample_id="x",
    )
    answer = await client.put("/keptset/v1/steps/1", content=encode(TrainingBatch.build(1, [untrained])))
    assert answer.status_code == 422
    assert "there is nothing to train on" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length_is_told", [True, False])
async def test_a_batch_over_the_bound_is_not_kept(folders, loop, length_is_told):
    async def chunks():
        for _ in range(11):
            yield b"x" * 100

    client = client_of(folders, loop, max_batch_bytes=1000)
    answer = await client.put("/keptset/v1/steps/1", content=b"x" * 1001 if length_is_told else chunks())
    assert answer.status_code == 413
    assert "trainer.max_batch_bytes = 1000" in answer.json()["error"]["message"]
    assert not list(folders.spool.iterdir())


async def test_an_upload_that_breaks_off_is_not_kept(client, folders, make_batch):
    body = encode(make_batch(1))
    events = iter(
        [{"type": "http.request", "body": body[:100], "more_body": True}, {"type": "http.disconnect"}]
    )
    sent = []

    async def receive():
        return next(events)

    async def send(message):
        sent.append(message)

    path = "/keptset/v1/steps/1"
    scope = {"type": "http", "method": "PUT", "path": path, "query_string": b"", "headers": []}
    await client._transport.app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert not list(folders.spool.iterdir())


async def test_a_full_disk_acknowledges_nothing(client, folders, make_batch, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "fsync_path", full)
        answer = await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    assert answer.status_code == 507
    assert "the disk is full" in answer.json()["error"]["message"]
    assert not list(folders.spool.iterdir())
    assert (await client.get("/keptset/v1/status")).json()["next_step"] == 1
    assert (await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))).status_code == 202


async def test_a_batch_whose_name_the_disk_does_not_confirm_stays_and_ends_the_service(
    client, folders, loop, make_batch, monkeypatch
):
    """It is visible to the loop: taking it back could let two batches of one step be trained."""

    def broken_names(path):
        if path == folders.spool:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "fsync_path", broken_names)
        answer = await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    assert answer.status_code == 500
    assert "did not confirm its name" in answer.json()["error"]["message"]
    assert "step 1" in loop.reason
    assert folders.batch(1).exists()
    again = await client_of(folders, PlayedLoop()).put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    assert again.status_code == 200, "a trainer that is started again knows it"


async def test_a_client_that_falls_silent_in_a_batch_is_let_go(client, folders, monkeypatch):
    monkeypatch.setattr(app_module, "BODY_PATIENCE", 0.2)

    async def stalls():
        yield b"half of a batch"
        await asyncio.sleep(30)

    answer = await asyncio.wait_for(client.put("/keptset/v1/steps/1", content=stalls()), 25)
    assert answer.status_code == 408
    assert "waited 0 s for more of the body" in answer.json()["error"]["message"]
    assert not list(folders.spool.iterdir())


async def test_a_disk_that_fills_while_the_body_arrives_acknowledges_nothing(client, folders, make_batch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # a real write error, not a played one
    try:
        answer = await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert answer.status_code == 507
    assert not list(folders.spool.iterdir())


async def test_an_ingest_that_comes_back_knows_what_it_accepted(client, folders, loop, make_batch):
    for step in (1, 2):
        await client.put(f"/keptset/v1/steps/{step}", content=encode(make_batch(step)))
    trained(folders, make_batch(1))
    folders.batch(1).unlink()  # as the loop does with old ones
    again = client_of(folders, loop)
    status = (await again.get("/keptset/v1/status")).json()
    assert (status["next_step"], status["trained_step"], status["weight_version"]) == (3, 1, 1)
    for step in (1, 2):
        answer = await again.put(f"/keptset/v1/steps/{step}", content=encode(make_batch(step)))
        assert answer.status_code == 200


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data.replace(b"test", b"tesd", 1)])
def test_a_damaged_batch_in_the_spool_stops_the_start(folders, make_batch, damage):
    folders.batch(1).write_bytes(encode(make_batch(1)))
    assert Spool(folders, 64).next_step == 2
    folders.batch(1).write_bytes(damage(encode(make_batch(1))))
    with pytest.raises(ValueError, match=r"step-000001.msgpack: .*it is not what was accepted; remove it"):
        Spool(folders, 64)


def test_a_gap_in_the_spool_stops_the_start(folders, make_batch):
    folders.batch(2).write_bytes(encode(make_batch(2)))
    with pytest.raises(ValueError, match=r"steps \[2\] are there, not 1, 2, 3"):
        Spool(folders, 64)


async def test_status_says_what_the_orchestrator_asks(client):
    assert (await client.get("/keptset/v1/status")).json() == {
        "service": "trainer",
        "version": "0.1.0",
        "next_step": 1,
        "trained_step": 0,
        "weight_version": 0,
        "training": None,
        "vocab_size": 261,
        "row_tokens": 64,
        "model": "m",
        "unsafe_ignore_kept_tokens": False,
        "full_vocabulary_scores": False,
        **dict.fromkeys(("sends_weights", "shares_gpu"), False),
        "sending": None,
        "loop_pid": 1,
    }


async def test_metrics_are_readable_by_prometheus(client, folders, make_batch):
    for step in (1, 2):
        await client.put(f"/keptset/v1/steps/{step}", content=encode(make_batch(step)))
    trained(folders, make_batch(1))
    lines = (await client.get("/metrics")).text.splitlines()
    assert "keptset_trainer_step 1.0" in lines
    assert "keptset_trainer_queue_length 1.0" in lines
    assert f'keptset_trainer_metric{{name="loss"}} {0.1 + 0.2}' in lines
    assert "keptset_trainer_step_seconds 1.5" in lines


async def test_errors_have_one_form(client):
    answer = await client.get("/keptset/v1/steps/first")
    assert answer.status_code == 422
    assert set(answer.json()["error"]) == {"message", "type", "code"}


def test_the_ingest_process_never_imports_torch():
    code = (
        "import json, sys, keptset_trainer.__main__, keptset_trainer.serve; "
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=99)
    assert json.loads(out.stdout) == []
