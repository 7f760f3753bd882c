"""A whole run over HTTP: what it sends, what it writes."""

from .driving import Drive
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer


async def test_run_does_all_steps_and_writes_a_row_for_each(
    drive: Drive, inference: FakeInference, trainer: FakeTrainer
):
    rows = await drive()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert inference.posted == [0, 1, 2, 3]
    assert sorted(trainer.batches) == [1, 2, 3]
