"""What a colocated run costs: GPU memory in each phase, seconds of sleep and wake; and is it the same run?

    python deploy/local/benchmarks/colocated.py CONFIG.toml --folder runs/turns --output colocated.json

Two runs of one configuration, one after the other: `together`, engine and trainer by turns on the first GPU,
and `apart`, on a GPU each; with `--trainer-gpu 0` they share the first one all the time (then the engine
needs a `kv_cache_memory_bytes` that leaves room). The model must be there (`inference.model`, or a warm start
that was made). Further options are those of `keptset run`. `--device cpu` tries the script without a GPU.

With `--inference.vllm.max_num_seqs 1` a request's answer does not depend on the others, and with
`--trainer.deterministic true` (GPU) neither does a step on the order of its sums: both runs then come to the
same bits, and with `--same` anything else ends it with 1. With `--transfer nccl` that also proves what NCCL
carried, since the run by turns takes its weights from files (NCCL on one GPU: see weight_update.py).
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
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 7200.0
"""Seconds that a run may take."""
POLL = 0.1
TOOK = ("sleep", "wake", "offload", "reload", "rollout", "train", "publish", "weights", "step")


def main() -> None:
    """Run it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # and not without the services
    options, settings = parse()
    found: dict[str, Any] = {"config": options.config.name, "device": options.device, "steps": options.steps}
    found |= {"options": settings, "trainer_gpu": options.trainer_gpu, "transfer": options.transfer}
    for arm in options.arms:
        folder = options.folder / arm
        if folder.exists():
            shutil.rmtree(folder)
        found[arm] = arm_of(arm, options, settings, folder)
        print(json.dumps({arm: found[arm]}, indent=1), flush=True)
    if {"together", "apart"} <= set(options.arms):
        found["difference"] = difference(options.folder / "together", options.folder / "apart")
        print(json.dumps({"difference": found["difference"]}, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    if options.same and found["difference"] != {"batches": 0, "weights": 0}:
        sys.exit("the two runs differ")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path, help="of a run")
    parser.add_argument("--folder", type=Path, required=True, help="where the runs go; emptied first")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--arms", nargs="+", choices=["together", "apart"], default=["together", "apart"])
    parser.add_argument("--trainer-gpu", default="1", help="of the run in which the two are apart")
    parser.add_argument(
        "--transfer", choices=["files", "nccl"], default="files", help="of weights, in that run"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--same", action="store_true", help="exit with 1 if the runs differ in a bit")
    return parser.parse_known_args()


def arm_of(arm: str, options: argparse.Namespace, settings: list[str], folder: Path) -> dict[str, Any]:
    """One run, watched; what it took."""
    ports = {name: free_port() for name in ("inference", "trainer", "orchestrator")}
    configs = folder / "configs"
    subprocess.run(
        [
            *(sys.executable, "-m", "keptset", "check", str(options.config)),
            *(
                "--runs-dir",
                str(options.folder),
                "--name",
                arm,
                "--colocated",
                str(arm == "together").lower(),
            ),
            *("--orchestrator.steps", str(options.steps), "--trainer.device", options.device),
            *("--weights.transfer", options.transfer if arm == "apart" else "files"),
            *(text for name, port in ports.items() for text in (f"--{name}.port", str(port))),
            *settings,
            *("--write", str(configs)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    apart = options.trainer_gpu
    gpus = {"inference": "0", "trainer": "0" if arm == "together" else apart, "orchestrator": ""}
    processes = {}
    try:
        for name, gpu in gpus.items():
            config = configs / ("inference-0.toml" if name == "inference" else f"{name}.toml")
            processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"keptset_{name}", "--config", str(config)],
                stdout=(folder / f"{name}.log").open("wb"),
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu if options.device == "cuda" else ""},
            )
        watch = Watch(ports, options.device)
        deadline = time.monotonic() + PATIENCE
        while processes["orchestrator"].poll() is None:
            ended = [name for name, process in processes.items() if process.poll() not in (None, 0)]
            if ended or time.monotonic() > deadline:
                last = ended[0] if ended else "orchestrator"
                sys.exit(f"{arm}: {last} ended\n{(folder / f'{last}.log').read_text()[-4000:]}")
            time.sleep(POLL)
        if processes["orchestrator"].poll() != 0:
            sys.exit(f"{arm}: the run failed\n{(folder / 'orchestrator.log').read_text()[-4000:]}")
        phases = watch.ended()
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    rows = rows_of(folder)
    named = {name: [row[f"seconds/{name}"] for row in rows if f"seconds/{name}" in row] for name in TOOK}
    return {
        "seconds": {
            name: {"median": statistics.median(values), "worst": max(values)}
            for name, values in named.items()
            if values
        },
        "phases": phases,
        # that there was something to learn, without which any two runs are the same
        "learned": [{name: row.get(name) for name in ("step", "reward/mean", "grad_norm")} for row in rows],
    }


class Watch:
    """Looks at the first GPU all the time, and at what the services say they are doing."""

    def __init__(self, ports: dict[str, int], device: str) -> None:
        self.ports, self.device = ports, device
        self.seen: dict[str, list[float | None]] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()

    def look(self) -> None:
        """Until told otherwise."""
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while not self.over.wait(POLL):
                sleep = self.said(client, "inference").get("sleep") or {"state": "there"}
                state = self.said(client, "orchestrator").get("state", "starting")
                used = memory_used() if self.device == "cuda" else None
                self.seen.setdefault(f"{state}, engine {sleep['state']}", []).append(used)

    def said(self, client: httpx.Client, name: str) -> dict[str, Any]:
        """A service's status; nothing if it does not answer."""
        try:
            answer = client.get(f"http://127.0.0.1:{self.ports[name]}/keptset/v1/status")
            return dict(answer.json()) if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}

    def ended(self) -> dict[str, dict[str, float]]:
        """By phase: how often it was seen, and MB in use on the GPU then, if there is one."""
        self.over.set()
        self.thread.join(30)
        found: dict[str, dict[str, float]] = {}
        for phase, figures in sorted(self.seen.items()):
            used = [figure for figure in figures if figure is not None]
            bounds = {"least_mb": min(used), "most_mb": max(used)} if used else {}
            found[phase] = {"times": len(figures), **bounds}
        return found


def memory_used() -> float:
    """MB in use on the first GPU, by whomever."""
    asked = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)


def difference(one: Path, other: Path) -> dict[str, float]:
    """Steps whose batch differs, versions whose weights do, and by how much rows do where they do."""
    found: dict[str, float] = {}
    batches = [{path.name for path in (folder / "rollouts").iterdir()} for folder in (one, other)]
    found["batches"] = len(batches[0] - batches[1])
    manifests = [
        {path.parent.name: path.read_bytes() for path in (folder / "weights").glob("v*/manifest.json")}
        for folder in (one, other)
    ]
    found["weights"] = sum(manifests[1].get(name) != content for name, content in manifests[0].items())
    for mine, theirs in zip(rows_of(one), rows_of(other), strict=True):
        for name in mine.keys() & theirs.keys():
            a, b = mine[name], theirs[name]
            if not name.startswith("seconds/") and a != b:
                found[name] = max(found.get(name, 0.0), abs((a or 0) - (b or 0)))
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What a run wrote of its steps."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    """That nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
