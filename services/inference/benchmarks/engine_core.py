"""CPU time of the engine's own process a step: from the arrays off the device to the message that is sent.

    python benchmarks/engine_core.py [--requests 256] [--output benchmarks/results/engine-core.json]

No GPU needed. What the scheduler does with a step's samples and what its sending thread does with the message
take turns with the model runner at the interpreter, so on a GPU they come on top of a step of a small model.
Real parts of vLLM: slices of each request, the encoder, the socket; the rest of its scheduler is left out.
`off` has logprobs=0 and no sets.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackEncoder

from keptset_inference.capture.cut import PAD
from keptset_inference.capture.flag import mark
from keptset_inference.capture.masks import KeptMasks
from keptset_inference.capture.scheduler import _WithKeptSets

VOCABULARY = 151_936
WIDTH = 512


class Vllms:
    """The part of vLLM's scheduler that makes an output for each request."""

    def __init__(self, params: SamplingParams, requests: int) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=None)
        self.requests = {f"{i:032x}": SimpleNamespace(sampling_params=params) for i in range(requests)}

    def update_from_output(self, _: Any, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """One token each."""
        logprobs, masks, made = output.logprobs, output.sampling_masks, []
        for row, name in enumerate(self.requests):
            made.append(
                EngineCoreOutput(
                    name,
                    output.sampled_token_ids[row],
                    new_logprobs=None if logprobs is None else logprobs.slice_request(row, 1),
                    new_sampling_mask=None if masks is None else masks.slice_request(row, 1),
                )
            )
        return {0: EngineCoreOutputs(outputs=made)}


class Scheduler(_WithKeptSets, Vllms):
    """As `KeptScheduler`."""


def sets(requests: int, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids [R, WIDTH] with PAD behind, and how many [R]."""
    counts = np.full(requests, size) if size > 64 else generator.geometric(1 / size, requests).clip(max=WIDTH)
    ids = np.full((requests, WIDTH), PAD, np.int32)
    for row, count in zip(ids, counts, strict=True):
        row[:count] = np.sort(generator.choice(VOCABULARY, count, replace=False))
    return ids, counts.astype(np.int32)


def steps(requests: int, size: int) -> dict[str, Callable[[], Callable[[], dict[int, EngineCoreOutputs]]]]:
    """For each arm what makes a step's arrays, and returns what the engine does with them."""
    ids, counts = sets(requests, size, np.random.default_rng(0))
    wanting = SamplingParams(top_k=WIDTH, logprobs=0, detokenize=False)
    mark(wanting)
    plain = SamplingParams(top_k=WIDTH, logprobs=0, detokenize=False)
    scheduled = SimpleNamespace(num_scheduled_tokens={f"{i:032x}": 1 for i in range(requests)})
    ours, stock = Scheduler(wanting, requests), Vllms(plain, requests)
    bits = torch.zeros((requests, 1), dtype=torch.uint8)

    def output(columns: np.ndarray) -> ModelRunnerOutput:
        made = ModelRunnerOutput(req_ids=[], req_id_to_index={f"{i:032x}": i for i in range(requests)})
        made.sampled_token_ids = [[int(row[0])] for row in ids]
        logprobs = np.full((requests, 1), -0.5, np.float32)
        made.logprobs = LogprobsLists(np.ascontiguousarray(columns), logprobs, np.ones(requests, np.int64))
        return made

    def off() -> Callable[[], dict[int, EngineCoreOutputs]]:
        made = output(ids[:, :1])
        return lambda: stock.update_from_output(scheduled, made)

    def v1() -> Callable[[], dict[int, EngineCoreOutputs]]:
        made = output(np.concatenate((ids[:, :1], counts[:, None], ids), axis=1))
        return lambda: ours.update_from_output(scheduled, made)

    def native() -> Callable[[], dict[int, EngineCoreOutputs]]:
        made = output(ids[:, :1])
        masks = KeptMasks(torch.from_numpy(ids), bits, torch.from_numpy(counts), VOCABULARY)

        def update() -> dict[int, EngineCoreOutputs]:
            made.sampling_masks = masks.tolists()
            return ours.update_from_output(scheduled, made)

        return update

    return {"off": off, "v1": v1, "native": native}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, WIDTH])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{folder}/socket"
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.bind(address)
        pull.connect(address)
        done = threading.Event()
        reader = threading.Thread(target=drain, args=(pull, done))
        reader.start()
        for size in args.sizes:
            for name, make in steps(args.requests, size).items():
                key = f"{name}, sets of {size}" if name != "off" else f"off, beside sets of {size}"
                results[key] = measure(make, push, args.steps)
                print(f"{key:28} {results[key]}", flush=True)
        done.set()
        reader.join()
        push.close(linger=0)
    if args.output is not None:
        head = {"requests": args.requests, "unit": "microseconds of CPU a step"}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


def measure(make: Callable[[], Callable[[], Any]], socket: zmq.Socket, steps: int) -> dict[str, float]:
    """Medians of the scheduler's part, of encoding and of sending; the parts of a message."""
    encoder, times = MsgpackEncoder(), []
    for _ in range(steps):
        update = make()
        clock = [time.thread_time()]
        outputs = update()[0]
        clock.append(time.thread_time())
        parts = encoder.encode_into(outputs, bytearray())
        clock.append(time.thread_time())
        EngineCoreProc._send_msg_tracking_payload(socket, parts)
        clock.append(time.thread_time())
        times.append(np.diff(clock))
        time.sleep(0.001)
    scheduler, encode, send = (round(1e6 * float(value)) for value in np.median(times, axis=0))
    total = round(1e6 * float(np.median(np.sum(times, axis=1))))
    return {"scheduler": scheduler, "encode": encode, "send": send, "total": total, "parts": len(parts)}


def drain(socket: zmq.Socket, done: threading.Event) -> None:
    """What the API process does with the socket: take everything off it."""
    while not done.is_set():
        if socket.poll(50):
            socket.recv_multipart(copy=False)
    socket.close()


if __name__ == "__main__":
    main()
