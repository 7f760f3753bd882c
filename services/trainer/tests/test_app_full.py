"""How many batches may wait to be trained, and what the next one is told."""

import asyncio

from kept_tokens.messages import TrainingBatch, encode

from .played_loop import PlayedLoop, client_of, folders, trained

__all__ = ["folders"]  # a fixture


async def test_a_batch_too_many_is_sent_again_when_a_step_is_done(folders, make_batch):
    client = client_of(folders, PlayedLoop(), max_waiting=2)
    first, *others = [make_batch(step) for step in (1, 2, 3)]
    bodies = {batch.step: encode(batch) for batch in (first, *others)}
    for step in (1, 2):
        assert (await client.put(f"/keptset/v1/steps/{step}", content=bodies[step])).status_code == 202
    refused = await client.put("/keptset/v1/steps/3", content=bodies[3])
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    assert refused.json()["error"]["code"] == "spool_full"
    assert (
        "step 3: 2 batches wait to be trained, from step 1 on, and trainer.max_waiting_batches = 2; send it "
        "again when that step is done"
    ) in refused.text
    assert not folders.batch(3).exists()
    # what was accepted stays so, and another batch for it is the same conflict as ever
    assert (await client.put("/keptset/v1/steps/2", content=bodies[2])).status_code == 200
    other = encode(TrainingBatch.build(2, make_batch(3).samples))
    assert (await client.put("/keptset/v1/steps/2", content=other)).status_code == 409
    trained(folders, first)
    assert (await client.put("/keptset/v1/steps/3", content=bodies[3])).status_code == 202


async def test_a_batch_that_comes_slowly_does_not_pass_the_bound(folders, make_batch):
    client = client_of(folders, PlayedLoop(), max_waiting=2)
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly():
        asked.set()
        await go_on.wait()
        yield encode(make_batch(3))

    late = asyncio.create_task(client.put("/keptset/v1/steps/3", content=slowly()))
    await asyncio.wait_for(asked.wait(), 10)  # there was room when it was asked for its body
    for step in (1, 2):
        await client.put(f"/keptset/v1/steps/{step}", content=encode(make_batch(step)))
    go_on.set()
    assert (await late).status_code == 429
    assert not folders.batch(3).exists()
