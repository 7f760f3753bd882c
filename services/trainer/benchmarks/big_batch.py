"""One large batch through PUT and to the ranks: seconds of each phase, memory of all processes.

    python benchmarks/big_batch.py --output big_batch.json [--tokens 2500000] [--kept 20000000] [--ranks 2]

The trainer is the real command with a tiny model on the CPU. It takes the batch in and begins its step, which
is left after `--step-seconds`: what a step takes is not the question here. Memory is the proportional set
size (a page that k processes map counts 1/k for each), sampled every 20 ms, above what each process held when
it was idle after a small first step. Then as many processes as there are ranks read their shares from the
spool, as the training loop does, and say how much of it they decoded. Leaves with 1 if all processes together
took more than `--bound` times the batch.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kept_tokens import KeptTokens
from kept_tokens.messages import BatchView, TrainingBatch, TrainingSample, check_samples, encode
from keptset_trainer.durable import mapped
from keptset_trainer.packing import pack
from keptset_trainer.ranks import join, leave
from keptset_trainer.warm_start.tokenizer import byte_tokenizer

VOCAB_SIZE = 32768
SAMPLE_TOKENS, PROMPT_TOKENS = 1000, 100
ROW_TOKENS = 2 * SAMPLE_TOKENS
PATIENCE = 900.0
SAMPLING_SECONDS = 0.02


def main() -> None:
    """Run it."""
    options = parse()
    if options.reader is not None:
        read_share(options.reader)
        return
    with TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_model(folder / "model")
        batch, size = make_batch(folder, 2, options.tokens, options.kept)
        small, _ = make_batch(folder, 1, 4 * SAMPLE_TOKENS, 32 * SAMPLE_TOKENS)
        row, peaks = take_in(folder, options, small, batch)
        spooled = folder / "trainer" / "spool" / "step-000002.msgpack"
        readers = hand_over(folder, spooled if spooled.exists() else batch, options.ranks)
    together = peaks["together"]
    row = {
        "tokens": options.tokens,
        "kept_ids": options.kept,
        "batch_bytes": size,
        "ranks": options.ranks,
        **row,
        "readers": readers,
        "bound_bytes": int(options.bound * size),
        "peak_above_idle": peaks,
        "times_the_batch": round(together / size, 2),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    print(json.dumps(row, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(row, indent=1) + "\n")
    if together > options.bound * size:
        sys.exit(f"all processes together took {together / size:.2f} times the batch, not {options.bound:g}")


def take_in(
    folder: Path, options: argparse.Namespace, small: Path, batch: Path
) -> tuple[dict[str, Any], dict[str, int]]:
    """Seconds and idle memory of the trainer's processes, and their peaks above that."""
    with trainer(folder, options.ranks) as (process, client):
        put(client, 1, small)
        wait_for_result(client, 1, PATIENCE)
        memory = Memory(process.pid)
        answer = put(client, 2, batch)
        taking_in = memory.phase()
        began = time.monotonic()
        metrics = wait_for_result(client, 2, options.step_seconds)
        row = {
            "seconds/put": answer["put_seconds"],
            **{f"seconds/put/{name}": value for name, value in answer.get("seconds", {}).items()},
            "step_ended": metrics is not None,
            "seconds/step": time.monotonic() - began,
            "idle_bytes": memory.idle,
            "peak_above_idle/until_accepted": taking_in,
        }
        stepping = memory.phase()
        memory.stop()
    return row, {name: max(taking_in[name], stepping[name]) for name in taking_in}


def hand_over(folder: Path, spooled: Path, ranks: int) -> list[dict[str, float]]:
    """What each of `ranks` processes says of reading its share."""
    command = [sys.executable, __file__, "--reader", str(spooled)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    readers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | place | {"RANK": str(rank)})
        for rank in range(ranks)
    ]
    return [json.loads(reader.communicate(timeout=PATIENCE)[0].splitlines()[-1]) for reader in readers]


def read_share(path: Path) -> None:
    """Read a rank's share as the training loop does; print the seconds, and the bytes that it decoded."""
    torch.set_num_threads(1)
    ranks = join("cpu")
    idle = proportional_set_size(os.getpid())
    times = [time.perf_counter()]
    batch = BatchView(mapped(path))
    rows = pack(batch.samples, ROW_TOKENS, ranks.rank, ranks.size)
    times.append(time.perf_counter())
    check_samples(rows.own_samples(), VOCAB_SIZE, rows.indices)
    times.append(time.perf_counter())
    loss_tokens = sum(ranks.gathered(rows.loss_tokens()))
    for _ in rows:
        pass
    times.append(time.perf_counter())
    said: dict[str, Any] = {
        f"seconds/{name}": end - begin
        for name, (begin, end) in zip(("shares", "check", "pack"), pairwise(times), strict=True)
    }
    said |= {"samples": len(rows.indices), "rows": len(rows), "loss_tokens_of_all": loss_tokens}
    said["decoded_bytes"] = sum(len(encode(sample)) for sample in rows.own_samples())
    said["above_idle"] = proportional_set_size(os.getpid()) - idle
    print(json.dumps(said), flush=True)
    leave()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the row goes as JSON")
    parser.add_argument("--tokens", type=int, default=2_500_000, help="of the batch")
    parser.add_argument("--kept", type=int, default=20_000_000, help="kept ids of the batch")
    parser.add_argument("--ranks", type=int, default=2, help="training processes (gloo)")
    parser.add_argument("--bound", type=float, default=3.0, help="times the batch's size")
    parser.add_argument("--step-seconds", type=int, default=30, help="how long its step may go on")
    parser.add_argument("--folder", type=Path, help="where the trainer's files go for the time being")
    parser.add_argument("--reader", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(directory: Path) -> None:
    """One layer of 16: what the step itself takes is little beside the batch."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=SAMPLE_TOKENS,
        pad_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory, save_jinja_files=False)


def make_batch(folder: Path, step: int, tokens: int, kept: int) -> tuple[Path, int]:
    """A file with the batch, and its size; all samples are equally long and have as many kept ids."""
    samples, rest = divmod(tokens, SAMPLE_TOKENS)
    if rest or kept % samples:
        sys.exit(f"--tokens must be a multiple of {SAMPLE_TOKENS}, --kept one of the {samples} samples")
    generator = np.random.default_rng(step)
    path = folder / f"batch-{step}.msgpack"
    made = [make_sample(generator, f"{step}/{i}", kept // samples) for i in range(samples)]
    path.write_bytes(encode(TrainingBatch.build(step, made)))
    return path, path.stat().st_size


def make_sample(generator: np.random.Generator, name: str, kept: int) -> TrainingSample:
    """Kept sets of uneven sizes, ascending ids; the logprob is about what a model at its start gives."""
    said = SAMPLE_TOKENS - PROMPT_TOKENS
    sizes = generator.multinomial(kept - said, generator.dirichlet(np.full(said, 0.5))) + 1
    starts = np.cumsum(sizes) - sizes
    running = np.cumsum(generator.integers(1, 16, kept))
    first = np.repeat(running[starts], sizes)
    ids = running - first + np.repeat(generator.integers(0, VOCAB_SIZE // 4, said), sizes)
    assert ids.max() < VOCAB_SIZE
    sampled = ids[starts + (generator.random(said) * sizes).astype(int)]
    context = np.zeros(PROMPT_TOKENS)
    return TrainingSample.build(
        token_ids=np.concatenate([generator.integers(2, VOCAB_SIZE, PROMPT_TOKENS), sampled]),
        loss_mask=np.arange(SAMPLE_TOKENS) >= PROMPT_TOKENS,
        logprobs=np.concatenate([context, -np.log(sizes)]),
        temperatures=np.ones(SAMPLE_TOKENS),
        advantages=np.full(SAMPLE_TOKENS, generator.normal()),
        kept=KeptTokens(ids, sizes).pad_tokens(left=PROMPT_TOKENS),
        must_have_masks=True,
        source="benchmark",
        group=name,
        sample_id=name,
    )


@contextmanager
def trainer(folder: Path, ranks: int) -> Iterator[tuple[subprocess.Popen, httpx.Client]]:
    """The command, healthy, and a client of it."""
    port = free_port()
    options = {
        "model": folder / "model",
        "output-dir": folder / "trainer",
        "weights-dir": folder / "weights",
        "port": port,
        "device": "cpu",
        "ranks": ranks,
        "row-tokens": ROW_TOKENS,
        "entropy": "off",
    }
    log = folder / "log"
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "keptset_trainer", *arguments],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + PATIENCE
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:
        try:
            while not is_healthy(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the trainer did not come up:\n{log.read_text()}")
                time.sleep(0.1)
            yield process, client
        finally:
            process.terminate()
            process.wait(90)
            sys.stderr.write(log.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def put(client: httpx.Client, step: int, path: Path) -> dict:
    """Send a batch from its file; the answer, with `put_seconds`."""
    began = time.monotonic()
    with path.open("rb") as file:
        answer = client.put(f"/keptset/v1/steps/{step}", content=iter(lambda: file.read(1 << 20), b""))
    if answer.status_code != 202:
        sys.exit(f"PUT of step {step}: {answer.status_code} {answer.text}")
    return answer.json() | {"put_seconds": time.monotonic() - began}


def wait_for_result(client: httpx.Client, step: int, seconds: float) -> dict[str, float] | None:
    """The metrics of a step, or None if it goes on after `seconds`."""
    answer = client.get(f"/keptset/v1/steps/{step}", params={"wait": seconds})
    if answer.status_code == 202:
        return None
    if answer.status_code != 200:
        sys.exit(f"GET of step {step}: {answer.status_code} {answer.text}")
    return answer.json()["metrics"]


class Memory:
    """Samples the proportional set size of a process and of its children, until `stop`."""

    def __init__(self, pid: int) -> None:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.names = {pid: "ingest"}
        for child in map(int, children):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = next(v.removeprefix(b"RANK=") for v in environment if v.startswith(b"RANK="))
            self.names[child] = f"rank {rank.decode()}"
        self.idle = self.read()
        self.peaks: dict[str, int] = {}
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def read(self) -> dict[str, int]:
        return {name: proportional_set_size(pid) for pid, name in self.names.items()}

    def sample(self) -> None:
        while not self.ended.wait(SAMPLING_SECONDS):
            above = {name: size - self.idle[name] for name, size in self.read().items()}
            above["together"] = sum(above.values())
            with self.lock:
                for name, size in above.items():
                    self.peaks[name] = max(size, self.peaks.get(name, 0))

    def phase(self) -> dict[str, int]:
        """The peaks since the last call, bytes above idle."""
        with self.lock:
            peaks, self.peaks = self.peaks, {}
        return peaks

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()


def proportional_set_size(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no Pss")


if __name__ == "__main__":
    main()
