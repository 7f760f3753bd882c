"""Real ranks that torchrun starts, and a real ingest process that starts none: both come and go."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from keptset import ports
from keptset_settings import TrainerSettings
from keptset_trainer import train

from .stored_run import folders_of, results_of, spool
from .test_process import PATIENCE, Trainer, is_alive, weights_under
from .test_ranks import on_ranks

RANKS_TIMEOUT = 6.0
"""Seconds; a busy machine's ranks must not count as away."""
STEPS = 5


class Ranks:
    """torchrun over the settings that an ingest process writes; may be started again and again."""

    def __init__(self, root: Path, name: str = "ranks", *place: str) -> None:
        self.place = place or ("--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:0")
        self.settings, self.log = root / "trainer" / "settings.json", root / f"{name}.log"
        self.process: subprocess.Popen | None = None

    def start(self, *options: str) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
        self.process = subprocess.Popen(
            [*torchrun, *self.place, *options, "-m", "keptset_trainer.loop", str(self.settings)],
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )

    def pids(self) -> list[int]:
        """Of the ranks."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [
            pid
            for pid in map(int, children.split())
            if b"keptset_trainer.loop" in command_of(pid).split(b"\0")
        ]

    def kill(self) -> None:
        """All at once, torchrun first: nobody is left to say anything."""
        pids = self.pids()
        self.process.kill()
        self.process.wait()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def process_ends(self) -> None:
        """As a pod that is moved."""
        self.process.terminate()
        self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def said(self, words: str) -> Callable[[], bool]:
        return lambda: words in self.log.read_text()


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


@pytest.fixture
def trainer(tiny_directory: Path, tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(
        tiny_directory, tmp_path, **{"ranks": "external", "ranks-timeout": RANKS_TIMEOUT, "keep-weights": 9}
    )
    yield trainer
    if trainer.process is not None and trainer.process.poll() is None:
        trainer.process.kill()
        trainer.process.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with closing(Ranks(tmp_path)) as ranks:
        yield ranks


def health(trainer: Trainer) -> str:
    answer = trainer.client.get("/health")
    return "" if answer.status_code == 200 else answer.json()["error"]["message"]


def numbers(results: list[dict]) -> list[dict[str, Any]]:
    """All that is not a duration."""
    return [
        {name: value for name, value in result["metrics"].items() if not name.startswith("seconds/")}
        for result in results
    ]


@pytest.fixture
def expected(
    settings: TrainerSettings, make_batch: Any, tmp_path: Path, leaves_when_there_is_nothing_to_train: None
) -> Any:
    """Results and weights of two ranks that nobody disturbs, forked from this process."""
    root = tmp_path / "undisturbed"
    places = {"output_dir": root / "trainer", "weights_dir": root / "weights", "keep_weights": 9}
    settings = settings.model_copy(update=places)
    folders = folders_of(settings)
    spool(folders, *map(make_batch, range(1, STEPS + 1)))
    on_ranks(2, lambda ranks: train.train(settings, ranks, None), tmp_path)
    return numbers(list(results_of(folders).values())), weights_under(root)


@pytest.mark.timeout(1200)  # torch is imported six times
def test_external_ranks_and_ingest_come_and_go_and_train_what_undisturbed_ranks_would(
    trainer, ranks, make_batch, expected
):
    # pods start in any order
    ranks.start()
    trainer.wait_for("a word of the ranks", ranks.said(f"waiting for {ranks.settings}"))
    trainer.start()
    results = []
    assert trainer.put(make_batch(1)).status_code == 202
    results.append(trainer.result(1))

    # a second loop over the same folder; its first rank as torchrun would start it
    second = [sys.executable, "-m", "keptset_trainer.loop", str(ranks.settings)]
    refused = subprocess.run(second, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert refused.returncode == 1
    assert "another training loop is there (2 ranks, the first of them process " in refused.stderr
    assert len(ranks.pids()) == 2

    # all ranks are killed in the middle of a step, or before or after it
    assert trainer.put(make_batch(2)).status_code == 202
    ranks.kill()
    trainer.wait_for(
        "ranks to be missed", lambda: "no sign of life from external ranks for" in health(trainer)
    )
    assert trainer.put(make_batch(3)).status_code == 202, (
        "the spool takes batches for ranks that may come back"
    )
    waiting = trainer.client.get("/keptset/v1/steps/3", params={"wait": 0.1})
    assert waiting.status_code == 202
    assert waiting.json()["state"] == "queued"
    assert "no sign of life from external ranks for" in waiting.json()["waits_for"]
    ranks.start()
    results += [trainer.result(2), trainer.result(3)]
    trainer.wait_for("health", trainer.is_healthy)

    # ingest is killed: the ranks train what it has taken in, and wait for the next one
    pids = ranks.pids()
    assert trainer.put(make_batch(4)).status_code == 202
    trainer.process.kill()
    trainer.ended()
    trainer.start()
    assert trainer.client.get("/keptset/v1/status").json()["next_step"] == 5
    assert trainer.put(make_batch(4)).status_code == 200
    results.append(trainer.result(4))
    assert trainer.put(make_batch(5)).status_code == 202
    results.append(trainer.result(5))
    assert ranks.pids() == pids
    assert all(is_alive(pid) for pid in pids)
    assert (numbers(results), trainer.weights()) == expected

    # each can be told to end without the other
    ranks.process_ends()
    trainer.wait_for("the ranks' last words", lambda: "have ended: they were told to stop" in health(trainer))
    trainer.process.terminate()
    assert trainer.ended() == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ranks_that_ingest_starts_itself_train_the_same(trainer, make_batch, expected):
    trainer.options["ranks"] = 2
    trainer.start()
    results = []
    for step in range(1, STEPS + 1):
        assert trainer.put(make_batch(step)).status_code == 202
        results.append(trainer.result(step))
    assert (numbers(results), trainer.weights()) == expected
    trainer.process.terminate()
    assert trainer.ended() == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_torchrun_brings_back_ranks_that_died_or_have_other_settings_than_ingest(trainer, ranks, make_batch):
    trainer.start(wait=False)
    trainer.wait_for("an answer", lambda: is_listening(trainer))
    assert "no external ranks have come yet" in health(trainer)
    refused = trainer.put(make_batch(1))
    assert refused.status_code == 503
    assert "no external ranks have come yet" in refused.json()["error"]["message"]

    ranks.start("--max-restarts=5")
    trainer.wait_for("its model", trainer.is_healthy)
    assert trainer.put(make_batch(1)).status_code == 202
    first = trainer.result(1)
    pids = ranks.pids()
    os.kill(max(set(pids) - {trainer.loop_pid()}), signal.SIGKILL)
    trainer.wait_for("torchrun to end the other", lambda: not any(is_alive(pid) for pid in pids))
    assert trainer.put(make_batch(2)).status_code == 202
    assert trainer.result(2)["metrics"]["lr"] == first["metrics"]["lr"]

    # an ingest process with other settings comes
    trainer.process.terminate()
    assert trainer.ended() == 0
    trainer.options["optimizer.lr"] = 5e-4
    trainer.start(wait=False)
    trainer.wait_for(
        "the ranks to see it", ranks.said("settings.json has changed since this loop began (opt")
    )
    trainer.wait_for("its model", trainer.is_healthy)
    assert trainer.put(make_batch(3)).status_code == 202
    assert trainer.result(3)["metrics"]["lr"] == 5e-4


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ranks_whose_last_checkpoint_the_disk_refuses_say_so_and_train_what_it_had_once_more(
    trainer, ranks, make_batch, monkeypatch
):
    trainer.options["checkpoint-interval"] = 10
    trainer.start(wait=False)
    ranks.start()
    trainer.wait_for("its model", trainer.is_healthy)
    assert "its ranks are external: TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60 torchrun" in trainer.log.read_text()
    assert ranks.said("torchrun waits 30 s for these ranks, and then kills them: less than trainer.shut")()
    for step in (1, 2):
        assert trainer.put(make_batch(step)).status_code == 202
        trainer.result(step)
    published = trainer.weights()
    for pid in ranks.pids():
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
    ranks.process_ends()
    trainer.wait_for("the ranks' last words", lambda: "have ended: trainer: step 2" in health(trainer))
    assert "its checkpoint cannot be written to output_dir/checkpoints: the disk is full" in health(trainer)
    assert "from the checkpoint of step 0 and trains steps 1 to 2 once more" in health(trainer)

    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    ranks.start()
    trainer.wait_for("steps 1 and 2 again", ranks.said("step 2 again: the same bits as version 2"))
    assert ranks.said("torchrun waits 60 s for these ranks (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)")()
    assert trainer.weights() == published
    ranks.process_ends()
    trainer.wait_for("the ranks' last words", lambda: "have ended: they were told to stop" in health(trainer))
    trainer.process.terminate()
    assert trainer.ended() == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nodes_come_and_go_and_the_others_wait_for_them(trainer, make_batch):
    """Two torchruns of one rank each; what Kubernetes does with their pods, the test does."""
    meeting = f"--rdzv-endpoint=127.0.0.1:{ports.pick('127.0.0.1', set())}"
    place = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=run", meeting, "--max-restarts=9")
    with (
        closing(Ranks(trainer.root, "first", *place)) as first,
        closing(Ranks(trainer.root, "second", *place)) as second,
    ):
        ends = [
            lambda: None,
            second.kill,
            first.kill,  # where the nodes meet, and rank 0
            lambda: os.kill(second.pids()[0], signal.SIGKILL),
            second.process_ends,
            first.process_ends,
        ]

        def has_result(step: int) -> Callable[[], bool]:
            def look() -> bool:
                for node in (first, second):
                    if node.process is None or node.process.poll() is not None:
                        node.start()
                return trainer.client.get(f"/keptset/v1/steps/{step}").status_code == 200

            return look

        first.start()
        second.start()
        trainer.start()
        for step, end in enumerate(ends, 1):
            end()
            assert trainer.put(make_batch(step)).status_code == 202
            trainer.wait_for(f"step {step}", has_result(step))
        trainer.wait_for("health", trainer.is_healthy)


def is_listening(trainer: Trainer) -> bool:
    try:
        trainer.client.get("/health")
    except httpx.TransportError:
        return False
    return True
