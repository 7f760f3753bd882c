"""Weights over NCCL itself between real services, and a trainer that stops in the middle."""

import base64
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from keptset import ports
from keptset_trainer.buckets import buckets
from keptset_trainer.nccl import Communicator, library

from ..started import SMALL_ENGINE, UNTIL_HEALTHY, Started

GPUS = torch.cuda.device_count()
"""Two, or one and an NCCL that takes two processes there: 2.30 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1."""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        GPUS < 2 and (GPUS == 0 or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"),
        reason="needs two GPUs, or one where NCCL takes two processes",
    ),
]
TRAINER_GPU = str(min(GPUS, 2) - 1)
ENGINE = SMALL_ENGINE | {"gpu_memory_utilization": 0.1}
SECONDS = 5.0
"""Until workers give a trainer up."""


@dataclass
class Services:
    """One of each."""

    inference: httpx.Client
    trainer: httpx.Client
    threads: ThreadPoolExecutor

    def group(self) -> dict[str, Any]:
        answer = self.trainer.post("/keptset/v1/weights/group")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def receive(self, group: dict[str, Any], seconds: float) -> "Future[httpx.Response]":
        """Asked of inference; the group is joined meanwhile."""
        transfer = {**group, "rank_offset": 1, "world_size": 2, "seconds": seconds}
        body = {"version": 0, "transfer": transfer}
        return self.threads.submit(self.inference.post, "/keptset/v1/weights", json=body)

    def logprobs(self) -> list[float]:
        sampling = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": [5, 6, 7, 8], "sampling_params": sampling}
        answer = self.inference.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        return [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]


@pytest.fixture
def services(started: Started) -> Iterator[Services]:
    clients = []
    for name, gpu, *options in (
        ("trainer", TRAINER_GPU, "--output_dir", started.folder / "trainer", "--device", "cuda"),
        ("inference", "0", *(f"--vllm.{key}={value}" for key, value in ENGINE.items())),
    ):
        port = ports.pick("127.0.0.1", set())
        started.start(
            f"keptset_{name}",
            *("--model", started.model, "--weights_dir", started.folder / "weights", "--port", port),
            *("--weights_transfer", "nccl", *options),
            environment={"CUDA_VISIBLE_DEVICES": gpu},
        )
        clients.append(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False))
    for client in clients:
        started.wait_until(
            lambda client=client: healthy(client), UNTIL_HEALTHY, f"health of {client.base_url}"
        )
    with ThreadPoolExecutor(1) as threads:
        yield Services(inference=clients[1], trainer=clients[0], threads=threads)
    for client in clients:
        client.close()


def empty(tensor: tuple[str, str, list[int]]) -> torch.Tensor:
    _, dtype, shape = tensor
    return torch.empty(shape, dtype=getattr(torch, dtype))


def healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_who_stops_in_the_middle_is_named_the_old_weights_serve_and_the_next_transfer_comes(services):
    before = services.logprobs()
    group = services.group() | {"bucket_bytes": 1 << 16}
    first = next(buckets(map(empty, group["tensors"]), group["bucket_bytes"]))
    group["unique_id"] = base64.b64encode(unique_id := library().unique_id()).decode()
    answered = services.receive(group, SECONDS)
    torch.cuda.set_device(int(TRAINER_GPU))
    stream = torch.cuda.Stream()
    played = Communicator(unique_id, 2, 0)
    with torch.cuda.stream(stream):
        played.all_reduce(torch.zeros(1, device="cuda"), stream.cuda_stream)
        played.broadcast(torch.full_like(first, 255, device="cuda"), 0, stream.cuda_stream)
    began = time.monotonic()
    answer = answered.result(SECONDS + 60)
    assert answer.status_code in (500, 504), answer.text
    assert "while waiting for the trainer to send version 0" in answer.json()["error"]["message"]
    assert time.monotonic() - began < SECONDS + 40, "LEAVE_GRACE of the workers, and a load"
    played.abort()
    assert services.logprobs() == before, "the files of the version that served"
    group = services.group()
    answered = services.receive(group, 60.0)
    sent = services.trainer.post(
        "/keptset/v1/weights/0/send", json={"unique_id": group["unique_id"], "world_size": 2, "seconds": 60.0}
    )
    assert sent.status_code == 200, sent.text
    answer = answered.result(60)
    assert answer.status_code == 200, answer.text
    assert services.logprobs() == before, "what NCCL has carried is what is in the files"
