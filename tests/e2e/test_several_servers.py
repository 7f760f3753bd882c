"""Two real inference servers, one of them killed in mid-step; then the same two behind a router."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from keptset import ports

from ..started import ONE_THREAD, SMALL_ENGINE, UNTIL_ENDED, UNTIL_HEALTHY, Started

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROMPTS, GROUP = 24, 4
ENGINE = SMALL_ENGINE | {"max_num_seqs": GROUP}
"""One group at a time in each engine, so that a step lasts long enough to be hit."""
STEP_SECONDS = 300
TWO_HEALTHY = 2 * UNTIL_HEALTHY
"""Seconds that a loaded machine may take to start two engines at a time."""


@dataclass
class Run:
    """The services of one run, each started alone."""

    started: Started
    servers: list[str]
    trainer: str
    orchestrator: "subprocess.Popen[str] | None" = None

    @property
    def folder(self) -> Path:
        return self.started.folder / "run"

    def serve(self, index: int) -> None:
        """Start an inference server, or start it again."""
        url, options = self.servers[index], [f"--vllm.{name}={value}" for name, value in ENGINE.items()]
        self.started.start(
            "keptset_inference",
            *("--model", self.started.model, "--weights_dir", self.started.folder / "weights"),
            *("--port", httpx.URL(url).port, "--enable-return-sampling-mask", "true", *options),
            name=f"inference-{index}",
            environment=ONE_THREAD,
        )

    def train(self) -> None:
        self.started.start(
            "keptset_trainer",
            *("--model", self.started.model, "--weights_dir", self.started.folder / "weights"),
            *("--port", httpx.URL(self.trainer).port, "--output_dir", self.started.folder / "trainer"),
            *("--row_tokens", 512, "--optimizer.lr", 1e-4),
            environment=ONE_THREAD,
        )

    def orchestrate(self, steps: int, *more: object) -> "subprocess.Popen[str]":
        self.orchestrator = self.started.start(
            "keptset_orchestrator",
            *("--port", 0, "--inference_urls", json.dumps(self.servers), "--trainer_url", self.trainer),
            *("--tokenizer", self.started.model, "--output_dir", self.folder, "--steps", steps),
            *("--startup_timeout", TWO_HEALTHY, "--train.prompts_per_step", PROMPTS),
            *("--train.group_size", GROUP, "--train.sampling.top_p", 0.97, "--train.sampling.max_tokens", 18),
            *more,
        )
        return self.orchestrator

    def rows(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def log(self) -> str:
        return self.started.output("keptset_orchestrator", "err")

    def of_server(self, index: int, metric: str) -> float:
        """One of vLLM's metrics; none are there before the first request."""
        lines = httpx.get(f"{self.servers[index]}/metrics", timeout=UNTIL_ENDED).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0] == f"vllm:{metric}")

    def wait(self, condition, what: str, seconds: float = STEP_SECONDS) -> None:
        def come() -> object:
            assert self.orchestrator.poll() is None, f"it ended before {what}: {self.log()[-2000:]}"
            return condition()

        self.started.wait_until(come, seconds, f"{what}; the orchestrator says: {self.log()[-2000:]}")


@pytest.fixture
def run(started: Started) -> Run:
    taken: set[int] = set()
    for _ in range(3):
        taken.add(ports.pick("127.0.0.1", taken))
    first, second, trainer = (f"http://127.0.0.1:{port}" for port in taken)
    return Run(started, [first, second], trainer)


@pytest.mark.timeout(2400)
def test_killed_server_is_done_without_and_taken_back_with_the_right_weights(run: Run, sections):
    started = run.started
    for index in (0, 1):
        run.serve(index)
    run.train()
    orchestrator = run.orchestrate(10_000)
    run.wait(lambda: len(run.rows()) >= 2, "two steps", TWO_HEALTHY + 2 * STEP_SECONDS)

    kill_in_mid_step(run, 1)
    killed_at = time.monotonic()
    failed = re.compile(rf"{re.escape(run.servers[1])}: request \S+-reverse-text-(\d+)-")
    run.wait(lambda: failed.search(run.log()), "its requests to fail")
    hit = int(failed.search(run.log())[1])
    run.wait(lambda: len(run.rows()) > hit, "the step in which a server was killed")
    log = run.log()
    moved = len(failed.findall(log))
    assert f"{run.servers[1]} is lost" in log
    assert f"{run.servers[1]} is back" not in log, "the step went on without it"
    assert run.rows()[hit - 1]["rollout/error_rate"] > 0

    run.serve(1)
    back = f"inference server {run.servers[1]} is back with weights version "
    run.wait(lambda: back in run.log(), "the server to come back", UNTIL_HEALTHY)
    seconds_away = time.monotonic() - killed_at
    loaded = int(run.log().partition(back)[2].split()[0])
    run.wait(lambda: run.of_server(1, "generation_tokens_total") > 0, "requests for it")
    whole = len(run.rows()) + 2
    run.wait(lambda: len(run.rows()) >= whole, "two steps with it")
    assert loaded >= hit, "not the weights of when it was killed"
    orchestrator.send_signal(signal.SIGTERM)
    assert orchestrator.wait(UNTIL_ENDED) == 128 + signal.SIGTERM
    direct = len(run.rows())

    router = f"http://127.0.0.1:{ports.pick('127.0.0.1', set())}"
    options = ("--policy", "sticky_least_loaded", "--disable-retries", "--disable-circuit-breaker")
    metrics = ports.pick("127.0.0.1", set())
    port = httpx.URL(router).port
    started.start(
        "vllm_router.launch_router", *options, "--port", port, "--prometheus-port", metrics, name="router"
    )
    before = [run.of_server(index, "generation_tokens_total") for index in (0, 1)]
    orchestrator = run.orchestrate(direct + 3, "--router_url", router)
    assert orchestrator.wait(STEP_SECONDS * 3) == 0, run.log()
    after = [run.of_server(index, "generation_tokens_total") for index in (0, 1)]
    assert all(a > b for a, b in zip(after, before, strict=True)), "both have sampled, by way of the router"
    known = httpx.get(f"{router}/list_workers", timeout=UNTIL_ENDED).json()["urls"]
    assert set(known) == set(run.servers)

    every_step_has_every_group(run)
    for server in run.servers:
        status = httpx.get(f"{server}/keptset/v1/status", timeout=UNTIL_ENDED)
        newest = status.json()["weight_version"]
        assert newest == run.rows()[-1]["weight_version"] == direct + 3
    sections["a server killed in mid-step"] = [
        f"{moved} requests moved, {seconds_away:.1f} s until it was back, with version {loaded}; "
        f"it was killed in step {hit}; {direct} steps, then 3 by way of the router"
    ]
    for child in started.children:
        child.terminate()
    started.assert_nothing_is_left()


def kill_in_mid_step(run: Run, index: int) -> None:
    """SIGKILL to a server that is sampling and has more groups to sample than that one."""
    port = httpx.URL(run.servers[index]).port
    (pid,) = (p for p in run.started.living("-m keptset_inference ") if f"--port {port} " in command_of(p))
    run.wait(lambda: run.of_server(index, "num_requests_waiting") >= 2 * GROUP, "requests in its engine")
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: not any(f"--port {port} " in c for c in run.started.living().values()), "its end")


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def every_step_has_every_group(run: Run) -> None:
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        assert row["ratio/max_abs_log"] < 1e-4, f"step {row['step']}"
        assert row["kept/coverage"] == 1
        (file,) = (run.folder / "rollouts").glob(f"step-{row['step']:06d}-*")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        groups = Counter(line["sample_id"].rpartition("/")[0] for line in lines)
        assert groups == {f"reverse-text/{row['step']}/{index}": GROUP for index in range(PROMPTS)}
        assert {version for line in lines for version in line["weight_versions"]} == {row["step"] - 1}
