"""Seconds of a weight update, and of the pause in it, by files and by NCCL, with requests running.

    python services/inference/benchmarks/make_model.py qwen3-0.6b MODEL
    python deploy/local/benchmarks/weight_update.py MODEL --output weight_update.json [--updates 10]

Needs two GPUs: inference has the first, the trainer the second. `--trainer-gpu 0`: the first too, which NCCL
refuses unless it is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 (older ones: `--arms files`). Both arms
run on the same services: the trainer's weights are sent again and again, or published once for each update.
The first update by NCCL also makes the group, and is said apart. `--arms files --device cpu` tries the script
without a GPU. Leaves with 1 if the median pause by NCCL is above `--bound`.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from keptset_trainer.nccl import library

PATIENCE = 900.0
SECONDS = 120.0
"""For one update."""


def main() -> None:
    """Run it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # and not without the services
    options = parse()
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        transfer = "nccl" if "nccl" in options.arms else "files"
        inference, trainer = stack.enter_context(services(options, folder, transfer))
        stack.enter_context(requests_running(inference, options.requests))
        row: dict[str, Any] = {
            "model": options.model.name,
            "device": options.device,
            "trainer_gpu": options.trainer_gpu,
            "requests": options.requests,
        }
        if "files" in options.arms:
            row["files"] = summary([by_files(inference, folder, n + 1) for n in range(options.updates)])
            write(row, options.output)  # the other arm may fail
        if "nccl" in options.arms:
            group = answer(trainer.post("/keptset/v1/weights/group"))
            row["tensors"] = len(group["tensors"])
            row["nccl/first"] = by_nccl(inference, trainer, group)
            row["nccl"] = summary([by_nccl(inference, trainer, group) for _ in range(options.updates)])
            row["nccl_version"] = library().version()
            row["bound"] = options.bound
            write(row, options.output)
    print(json.dumps(row, indent=1))
    if "nccl" in row and row["nccl"]["pause_seconds"]["median"] > options.bound:
        sys.exit(f"the median pause by NCCL is above {options.bound:g} s")


def write(row: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(row, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("--output", type=Path, help="where the row goes as JSON")
    parser.add_argument("--updates", type=int, default=10, help="of each kind")
    parser.add_argument("--requests", type=int, default=32, help="that run all the time")
    parser.add_argument("--bound", type=float, default=0.5, help="seconds that a pause by NCCL may take")
    parser.add_argument("--arms", nargs="+", choices=["files", "nccl"], default=["files", "nccl"])
    parser.add_argument("--trainer-gpu", default="1")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args()


@contextmanager
def services(
    options: argparse.Namespace, folder: Path, transfer: str
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of both, healthy."""
    weights = folder / "weights"
    common = {"model": options.model, "weights-dir": weights, "weights-transfer": transfer}
    beside = {"vllm.dtype": "float32", "vllm.enforce_eager": "true"} if options.device == "cpu" else {}
    if options.device == "cuda" and options.trainer_gpu == "0":  # they share it
        beside = {"vllm.kv_cache_memory_bytes": 8 << 30, "vllm.gpu_memory_utilization": 0.1}
    started: list[tuple[str, subprocess.Popen[bytes], httpx.Client]] = []
    try:
        for name, gpu, own in (
            ("trainer", options.trainer_gpu, {"output-dir": folder / "trainer", "device": options.device}),
            ("inference", "0", {"vllm.max_model_len": 1024, "vllm.max_num_seqs": options.requests, **beside}),
        ):
            port = free_port()
            arguments = {**common, "port": port, **own}
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"keptset_{name}",
                    *(text for key, value in arguments.items() for text in (f"--{key}", str(value))),
                ],
                stdout=(folder / f"{name}.log").open("wb"),
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu if options.device == "cuda" else ""},
            )
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False)
            started.append((name, process, client))
        for name, process, client in started:
            wait_until(lambda c=client: healthy(c), process, folder / f"{name}.log")
        yield started[1][2], started[0][2]
    finally:
        for _, process, client in started:
            client.close()
            process.terminate()
        for _, process, _ in started:
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"a service did not come up:\n{log.read_text()[-5000:]}")
        time.sleep(0.2)


def healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def requests_running(inference: httpx.Client, number: int) -> Iterator[None]:
    """As many as `number` at any time, so that a pause has something to stop."""
    ended = threading.Event()
    failures: list[str] = []

    def ask(seed: int) -> None:
        with httpx.Client(base_url=inference.base_url, timeout=PATIENCE, trust_env=False) as client:
            while not ended.is_set():
                sampling = {"temperature": 1.0, "max_tokens": 256, "ignore_eos": True, "seed": seed}
                body = {"token_ids": [5, 6, 7, 8], "sampling_params": sampling}
                response = client.post("/inference/v1/generate", json=body)
                if response.status_code != 200:
                    failures.append(response.text[:500])
                    return

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(number)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    if failures:
        sys.exit(f"requests failed: {failures[0]}")


def by_files(inference: httpx.Client, folder: Path, version: int) -> dict[str, float]:
    """Version 0 published once more, under another number."""
    first, target = folder / "weights" / "v000000", folder / "weights" / f"v{version:06d}"
    began = time.monotonic()
    shutil.copytree(first, target, copy_function=os.link, ignore=shutil.ignore_patterns("manifest.json"))
    manifest = json.loads((first / "manifest.json").read_bytes()) | {"version": version}
    (target / "manifest.json").write_text(json.dumps(manifest))
    told = answer(inference.post("/keptset/v1/weights", json={"version": version}))
    return {"wall_seconds": time.monotonic() - began, **told}


def by_nccl(inference: httpx.Client, trainer: httpx.Client, group: dict[str, Any]) -> dict[str, float]:
    """What the orchestrator does: the trainer first, the server once that is ready."""
    world_size = 1 + inference.get("/keptset/v1/status").json()["workers"]
    send = {"unique_id": group["unique_id"], "world_size": world_size, "seconds": SECONDS}
    sent: list[httpx.Response] = []
    began = time.monotonic()
    thread = threading.Thread(
        target=lambda: sent.append(trainer.post("/keptset/v1/weights/0/send", json=send)), daemon=True
    )
    thread.start()
    while not sent and trainer.get("/keptset/v1/status").json()["sending"] is None:
        time.sleep(0.005)
    transfer = {**group, "rank_offset": 1, "world_size": world_size, "seconds": SECONDS}
    told = (
        {}
        if sent
        else answer(inference.post("/keptset/v1/weights", json={"version": 0, "transfer": transfer}))
    )
    thread.join(SECONDS)
    sender = answer(sent[0])
    return {
        "wall_seconds": time.monotonic() - began,
        "sender_seconds": sender["seconds"],
        "bytes": sender["bytes"],
        **told,
    }


def answer(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        sys.exit(f"{response.request.url}: {response.status_code} {response.text}")
    return response.json()


def summary(updates: list[dict[str, float]]) -> dict[str, Any]:
    """Median and worst of each figure, and all of them."""
    names = [name for name in updates[0] if name.endswith("seconds")]
    figures = {name: [update[name] for update in updates] for name in names}
    return {
        name: {"median": statistics.median(values), "worst": max(values), "all": values}
        for name, values in figures.items()
    }


if __name__ == "__main__":
    main()
