"""The real command: start, steps over HTTP, killed, started again."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kept_tokens.messages import TrainingBatch, encode
from keptset import ports
from keptset_guards import GpuTurn

PATIENCE = 240.0
"""A busy machine takes half a minute to import torch, and more."""


class Trainer:
    """`python -m keptset_trainer` over one pair of directories; may be started again and again."""

    def __init__(self, model: Path, root: Path, **options: object) -> None:
        self.model, self.root, self.options = model, root, options
        self.log = root / "log"
        self.process: subprocess.Popen | None = None
        self.client: httpx.Client | None = None

    def start(self, wait: bool = True, output: int | None = None) -> None:
        """`output`: where its words go; None = the log."""
        port = ports.pick("127.0.0.1", set())
        options = {
            "model": self.model,
            "output-dir": self.root / "trainer",
            "weights-dir": self.root / "weights",
            "port": port,
            "row-tokens": 64,
            "max-batch-bytes": 1 << 20,
            "optimizer.lr": 1e-3,
            "device": "cpu",
            **self.options,
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keptset_trainer", *arguments],
            stdout=self.log.open("ab") if output is None else output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        if wait:
            self.wait_for("its model", self.is_healthy)

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, f"the trainer ended:\n{self.log.read_text()}"
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}:\n{self.log.read_text()}"
            time.sleep(0.02)

    def put(self, batch: TrainingBatch) -> httpx.Response:
        return self.client.put(f"/keptset/v1/steps/{batch.step}", content=encode(batch))

    def result(self, step: int) -> dict:
        answer = self.client.get(f"/keptset/v1/steps/{step}", params={"wait": PATIENCE})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def loop_pid(self) -> int:
        import json

        return json.loads((self.root / "trainer" / "loop.json").read_bytes())["pid"]

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def weights(self) -> dict[str, bytes]:
        return weights_under(self.root)


def weights_under(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in (root / "weights").rglob("*.*")}


@pytest.fixture
def trainer(tiny_directory: Path, tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tiny_directory, tmp_path, **{"gpu-lock": tmp_path / "gpu.lock"})
    yield trainer
    if trainer.process is not None and trainer.process.poll() is None:
        trainer.process.kill()
        trainer.process.wait()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(1200)  # it starts four times
def test_a_trainer_is_killed_twice_and_stopped_once_without_losing_a_step(trainer, make_batch):
    # an engine has the GPU: nothing is loaded yet
    engine = GpuTurn(trainer.root / "gpu.lock", "an engine", shared=True)
    assert engine.try_to_take()
    trainer.start(wait=False)
    word = f"waiting for the GPU, which an engine, process {os.getpid()} has"
    trainer.wait_for("a word", lambda: word in trainer.log.read_text())
    health = trainer.client.get("/health")
    assert health.status_code == 503
    assert "or waits for an engine to leave the GPU" in health.json()["error"]["message"]
    engine.give_back()
    trainer.wait_for("its model", trainer.is_healthy)
    assert trainer.client.get("/keptset/v1/status").json()["shares_gpu"]
    assert engine.try_to_take(), "without a batch the trainer is not there"

    assert trainer.put(make_batch(1)).status_code == 202
    assert trainer.client.get("/keptset/v1/steps/1", params={"wait": 0.3}).status_code == 202
    engine.give_back()
    first = trainer.result(1)
    assert engine.try_to_take(), "a step that has its result has left"
    engine.give_back()
    assert first["weight_version"] == 1
    assert first["metrics"]["ratio/max_abs_log"] < 1e-5

    # what must be refused is refused over a real connection too
    assert trainer.put(make_batch(1)).status_code == 200
    assert trainer.put(TrainingBatch.build(1, make_batch(9).samples)).status_code == 409
    assert trainer.put(make_batch(5)).json()["next_step"] == 2
    assert trainer.client.put("/keptset/v1/steps/2", content=b"no batch").status_code == 422
    assert trainer.client.put("/keptset/v1/steps/2", content=bytes(1 << 23)).status_code == 413

    # the ingest process is killed as soon as it has acknowledged a batch: its loop goes with it
    published, loop = trainer.weights(), trainer.loop_pid()
    assert trainer.put(make_batch(2)).status_code == 202
    trainer.process.kill()
    trainer.ended()
    trainer.wait_for("the loop to go with its parent", lambda: not is_alive(loop))

    trainer.start()
    assert trainer.client.get("/keptset/v1/status").json()["next_step"] == 3
    assert trainer.put(make_batch(2)).status_code == 200
    assert trainer.result(1) == first
    second = trainer.result(2)
    after = trainer.weights()
    assert {name: after[name] for name in published} == published

    # the loop is killed: the trainer ends by itself and says why
    os.kill(trainer.loop_pid(), signal.SIGKILL)
    assert trainer.ended() == 1
    said = trainer.log.read_text()
    assert "the training loop ended with exit code -9" in said
    assert "trainer: Qwen3ForCausalLM with" in said.split("last lines of the training loop")[1]

    trainer.start()
    assert trainer.result(2) == second
    assert trainer.put(make_batch(3)).status_code == 202
    assert trainer.result(3)["weight_version"] == 3

    # told to stop, it ends well, even with a request waiting, which is told
    loop = trainer.loop_pid()
    url = trainer.client.base_url
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as half_sent:
        half_sent.sendall(b"PUT /keptset/v1/steps/4 HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\nhalf")
        spool = trainer.root / "trainer" / "spool"  # beside it old checkpoints go meanwhile
        trainer.wait_for("a batch to come", lambda: any(spool.glob("*incoming*")))
        trainer.process.send_signal(signal.SIGTERM)
        answer = half_sent.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"stopping"' in answer
    assert trainer.ended() == 0
    assert not is_alive(loop)


@pytest.mark.timeout(1200)  # it starts three times
def test_an_end_without_a_last_checkpoint_is_a_failure_that_says_what_is_trained_once_more(
    trainer, make_batch
):
    del trainer.options["gpu-lock"]  # which goes without a last checkpoint
    trainer.options |= {"checkpoint-interval": 10, "shutdown-timeout": 1}

    def said() -> str:
        return trainer.log.read_text().rpartition("told to stop, it ends within")[2]

    # the loop does not end in time
    trainer.start()
    for step in (1, 2):
        assert trainer.put(make_batch(step)).status_code == 202
    first = [trainer.result(1), trainer.result(2)]
    assert " 6 s: trainer.shutdown_timeout = 1 is for a last checkpoint, 5 s for requests" in said()
    stopped(trainer.loop_pid())
    trainer.process.terminate()
    assert trainer.ended() == 1
    assert "the training loop did not end within 1 s of being told to, and was killed; the next" in said()
    left = "the next start goes on from the checkpoint of step 0 and trains steps 1 to 2 once more"
    assert left in said()

    # the disk refuses the checkpoint
    trainer.options["shutdown-timeout"] = 100
    trainer.start()
    assert trainer.put(make_batch(3)).status_code == 202
    third = trainer.result(3)
    assert [trainer.result(1), trainer.result(2)] == first
    assert "going on from the checkpoint of step 0: the batches of steps 1 to 2 are trained once" in said()
    published = trainer.weights()
    _, hard = resource.prlimit(trainer.loop_pid(), resource.RLIMIT_FSIZE)
    resource.prlimit(trainer.loop_pid(), resource.RLIMIT_FSIZE, (4096, hard))
    trainer.process.terminate()
    assert trainer.ended() == 1
    assert "told to stop, the training loop ended with exit code 1: trainer: step 3: its checkpoint" in said()
    assert "the disk is full; free some space or look at the disk, then start again: the next start" in said()
    assert "from the checkpoint of step 2 and trains step 3 once more" in said()

    # nothing is lost, and an end with one is none
    trainer.start()
    assert [trainer.result(1), trainer.result(2), trainer.result(3)] == [*first, third]
    trainer.wait_for("step 3 again", lambda: "step 3 again: the same bits as version 3" in said())
    assert trainer.weights() == published
    trainer.process.terminate()
    assert trainer.ended() == 0
    assert [path.name for path in sorted((trainer.root / "trainer" / "checkpoints").iterdir())] == [
        "step-000002",
        "step-000003",
    ]


def test_ctrl_c_of_a_pipeline_leaves_a_last_checkpoint(trainer, make_batch):
    """As of `keptset-trainer ... 2>&1 | tee log`: it ends whoever reads the trainer's words, too."""
    del trainer.options["gpu-lock"]  # which goes without a last checkpoint
    trainer.options["checkpoint-interval"] = 10
    reader, writer = os.pipe()
    trainer.log.touch()
    trainer.start(output=writer)
    os.close(writer)
    assert trainer.put(make_batch(1)).status_code == 202
    trainer.result(1)
    os.close(reader)
    trainer.process.send_signal(signal.SIGINT)
    assert trainer.ended() == 0
    assert [path.name for path in sorted((trainer.root / "trainer" / "checkpoints").iterdir())] == [
        "step-000000",
        "step-000001",
    ]


def stopped(pid: int) -> None:
    """It gets no signal but SIGKILL any more, as one that hangs."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + PATIENCE
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for process {pid} to be stopped"
        time.sleep(0.01)


def test_directories_of_another_run_are_refused_before_anything_is_loaded(tiny_directory, tmp_path):
    (tmp_path / "weights" / "v000004").mkdir(parents=True)
    options = ["--model", str(tiny_directory), "--output-dir", str(tmp_path / "trainer")]
    options += ["--weights-dir", str(tmp_path / "weights")]
    done = subprocess.run(
        [sys.executable, "-m", "keptset_trainer", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "holds 4 and earlier of another run" in done.stderr


def test_what_cannot_start_says_so_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "keptset_trainer", "--model", "m"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "output_dir: not set" in done.stderr


def test_a_port_in_use_is_named_before_the_training_loop_is_started(tiny_directory, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "keptset_trainer",
            "--model",
            str(tiny_directory),
            "--port",
            str(port),
        ]
        folders = ["--output_dir", str(tmp_path / "trainer"), "--weights_dir", str(tmp_path / "weights")]
        done = subprocess.run([*command, *folders], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert f"trainer.host = '127.0.0.1', trainer.port = {port}: Address already in use" in done.stderr
    assert "told to stop" not in done.stdout + done.stderr
    assert not (tmp_path / "trainer" / "settings.json").exists()
