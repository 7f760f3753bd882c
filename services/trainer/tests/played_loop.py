"""The HTTP API over a directory, with a training loop that is whatever the test says."""

from pathlib import Path

import httpx
import pytest

from kept_tokens.messages import TrainingBatch
from keptset_trainer.app import build_app
from keptset_trainer.durable import write_json
from keptset_trainer.folders import Folders
from keptset_trainer.spool import Spool


class PlayedLoop:
    """A training loop that is whatever the test says."""

    def __init__(self) -> None:
        self.said: dict | None = {"pid": 1, "vocab_size": 261, "training": None}
        self.reason: str | None = None
        self.stopping = False
        self.away: str | None = None

    def state(self) -> dict | None:
        return self.said

    def vocab_size(self) -> int | None:
        return (self.said or {}).get("vocab_size")

    def absent(self) -> str | None:
        return self.away

    def failure(self) -> str | None:
        return self.reason


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders(tmp_path / "trainer", tmp_path / "weights")
    folders.create()
    return folders


@pytest.fixture
def loop() -> PlayedLoop:
    return PlayedLoop()


@pytest.fixture
def client(folders: Folders, loop: PlayedLoop) -> httpx.AsyncClient:
    return client_of(folders, loop)


def client_of(folders: Folders, loop: PlayedLoop, **changes: object) -> httpx.AsyncClient:
    options = {"model": "m", "row_tokens": 64, "max_batch_bytes": 1 << 20, "unsafe_ignore_kept_tokens": False}
    options |= {"full_vocabulary_scores": False, "stop": lambda reason: setattr(loop, "reason", reason)}
    app = build_app(Spool(folders, changes.pop("max_waiting", 64)), loop, **options | changes)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://trainer")


def trained(folders: Folders, batch: TrainingBatch) -> None:
    """Do what the loop does at the end of a step."""
    write_json(
        folders.result(batch.step),
        {
            "step": batch.step,
            "weight_version": batch.step,
            "content_hash": batch.content_hash.hex(),
            "metrics": {"loss": 0.1 + 0.2, "seconds/train": 1.5},
        },
    )
