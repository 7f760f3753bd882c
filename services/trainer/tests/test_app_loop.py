"""The HTTP API while the training loop loads, is away or has died."""

from kept_tokens.messages import encode

from .played_loop import client, folders, loop, trained

__all__ = ["client", "folders", "loop"]  # fixtures


async def test_health_follows_the_loop(client, loop):
    assert (await client.get("/health")).status_code == 200
    loop.said = None
    starting = await client.get("/health")
    assert starting.status_code == 503
    assert "loading" in starting.json()["error"]["message"]
    loop.reason = "the training loop ended with exit code -9"
    died = await client.get("/health")
    assert died.status_code == 503
    assert "exit code -9" in died.json()["error"]["message"]


async def test_a_batch_waits_in_the_spool_for_ranks_that_are_away(client, folders, loop, make_batch):
    """External ones: their absence is no failure, and health says it."""
    loop.away = "no sign of life from external ranks for 61 s"
    health = await client.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "ranks_absent")
    assert health.json()["error"]["message"] == loop.away
    answer = await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    waiting = await client.get("/keptset/v1/steps/1", params={"wait": 0.1})
    assert waiting.status_code == 202
    assert waiting.json() == {"step": 1, "state": "queued", "waits_for": loop.away}
    assert (await client.get("/keptset/v1/status")).json()["vocab_size"] == 261
    loop.away = None
    assert "waits_for" not in (await client.get("/keptset/v1/steps/1")).json()
    trained(folders, make_batch(1))
    assert (await client.get("/keptset/v1/steps/1", params={"wait": 30})).status_code == 200


async def test_a_waiting_request_is_told_that_the_loop_died(client, loop, make_batch):
    await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    loop.reason = "the training loop ended with exit code 1: sample 3"
    answer = await client.get("/keptset/v1/steps/1", params={"wait": 30})
    assert answer.status_code == 503
    assert "sample 3" in answer.json()["error"]["message"]


async def test_nothing_is_accepted_before_the_model_is_there(client, loop, make_batch):
    loop.said = None
    answer = await client.put("/keptset/v1/steps/1", content=encode(make_batch(1)))
    assert answer.status_code == 503
