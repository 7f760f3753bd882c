"""The HTTP API of a trainer that looks at the whole vocabulary: references, and scores with the result."""

from kept_tokens.messages import StepResult, TrainingBatch, TrainingSample, decode, encode

from .played_loop import PlayedLoop, client_of, folders, trained

__all__ = ["folders"]  # a fixture


def compared(batch: TrainingBatch) -> TrainingBatch:
    """The same batch with a reference for its second sample."""
    first, second, *rest = batch.samples
    fields = {name: getattr(second, name) for name in second.__struct_fields__}
    mask = second.arrays().loss_mask
    reference = (mask * -1.5).astype("<f4").tobytes()
    changed = TrainingSample(**{**fields, "reference_logprobs": reference, "reference_weight": 0.5})
    return TrainingBatch.build(batch.step, [first, changed, *rest])


async def test_a_reference_needs_full_vocabulary_scores(folders, make_batch):
    body, loop = encode(compared(make_batch(1))), PlayedLoop()
    answer = await client_of(folders, loop).put("/keptset/v1/steps/1", content=body)
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert "sample 1" in message
    assert (
        "reference_weight: 0.5 asks for a comparison over the whole vocabulary; set trainer.full_v" in message
    )
    client = client_of(folders, loop, full_vocabulary_scores=True)
    assert (await client.put("/keptset/v1/steps/1", content=body)).status_code == 202
    assert (await client.get("/keptset/v1/status")).json()["full_vocabulary_scores"] is True


async def test_full_vocabulary_scores_come_with_the_binary_result(folders, make_batch):
    batch, client = make_batch(1), client_of(folders, PlayedLoop())
    await client.put("/keptset/v1/steps/1", content=encode(batch))
    scores = [b"abcd"] * len(batch.samples)
    folders.score(1).write_bytes(encode(StepResult(1, 1, {}, scores)))
    trained(folders, batch)
    binary = await client.get("/keptset/v1/steps/1", headers={"Accept": "application/msgpack"})
    assert decode(binary.content, StepResult).full_logprobs == scores
    assert (await client.get("/keptset/v1/steps/1")).json().keys() == {"step", "weight_version", "metrics"}
    folders.score(1).unlink()
    binary = await client.get("/keptset/v1/steps/1", headers={"Accept": "application/msgpack"})
    assert decode(binary.content, StepResult).full_logprobs == []
