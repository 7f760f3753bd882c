"""What only a GPU runs: FlashAttention, the fused optimiser, compiled blocks; skipped where there is none."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keptset_trainer import attention, attention_proof, master_weights
from keptset_trainer.master_weights import MasterCopies
from keptset_trainer.model import load_policy
from keptset_trainer.nccl_wire import NcclWire, PeersMissing, new_unique_id, prove
from keptset_trainer.offload import Offload
from keptset_trainer.one_gpu import kept
from keptset_trainer.optimizer import adamw, clip_and_step
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks
from keptset_trainer.train_step import NotFinite

from .one_step import one_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

LENGTHS = [300, 17, 1, 129, 64]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().norm())


@pytest.mark.parametrize("window", [-1, 50])
def test_flash_attention_is_the_cpus(window):
    torch.manual_seed(0)
    tensors = [torch.randn(sum(LENGTHS), heads, 64).bfloat16() for heads in (4, 2, 2, 4)]
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    results = []
    for device in ("cpu", "cuda"):
        *leaves, grad = (x.to(device).requires_grad_(i < 3) for i, x in enumerate(tensors))
        out, _ = torch.ops.keptset.varlen_attention(*leaves, borders.to(device), 300, 0.125, window)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(error(got, want) < 1e-2 for want, got in zip(*results, strict=True))


@pytest.mark.parametrize("kernel", attention.BATCH_KERNELS)
def test_a_batch_is_what_single_sequences_are_and_so_are_its_gradients(kernel):
    assert attention_proof.is_exact(kernel, 4, 2, 64, torch.device("cuda", 0), torch.bfloat16)


def test_a_step_that_is_not_finite_is_not_applied():
    class One:
        named = {"w": torch.ones(1000, device="cuda", requires_grad=True)}  # noqa: RUF012
        rounded = None

    optimizer = adamw(One, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)  # type: ignore[arg-type]
    weight, ranks = One.named["w"], Ranks(torch.device("cuda"))
    none = torch.zeros((), dtype=torch.float64, device="cuda")
    weight.grad = torch.full_like(weight, 2.0)
    norm, sound, _ = clip_and_step(optimizer, ranks, 1.0, none)
    assert sound
    assert float(norm) == pytest.approx(2 * 1000**0.5)
    after = weight.detach().clone()
    assert not torch.equal(after, torch.ones_like(after))
    weight.grad = torch.full_like(weight, torch.inf)
    assert not clip_and_step(optimizer, ranks, 1.0, none)[1]
    weight.grad = torch.full_like(weight, 1.0)
    assert not clip_and_step(optimizer, ranks, 1.0, none + 1)[1]
    assert torch.equal(weight, after)
    assert float(optimizer.state[weight]["step"]) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_on_a_gpu_is_the_cpus_and_blames_the_same_sample(tiny_directory, make_batch, compiled):
    results: list[Any] = []
    batch = make_batch(1)
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        ranks = Ranks(torch.device(device))
        policy = load_policy(str(tiny_directory), ranks.device, dtype)
        scorer, weights = prepare(policy, ranks, checkpointing="off", compiled=compiled and device == "cuda")
        optimizer = adamw(weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

        def step(policy=policy, scorer=scorer, weights=weights, optimizer=optimizer, ranks=ranks):
            return one_step(scorer, weights, optimizer, ranks, batch.samples)

        results.append(step())
    assert results[1]["entropy/full"] == pytest.approx(results[0]["entropy/full"], rel=0.02)
    assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=0.1)
    damaged = int(batch.samples[0].arrays().token_ids[0])
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter is policy.head:  # the master, from which the model would else be mended
                weights.named[name][damaged] = torch.nan
    weights.give_back()
    with pytest.raises(NotFinite, match=r"sample \d+ \(id '1/\d+'\) at position \d+: token"):
        step()


def test_the_only_row_s_gradients_are_applied_as_their_sum_would_be(tiny_directory, make_batch, monkeypatch):
    outcomes = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for summed in (False, True):
            if summed:
                monkeypatch.setattr(master_weights, "kernels_take", lambda _: False)
            policy = load_policy(str(tiny_directory), torch.device("cuda"), "bfloat16")
            scorer, weights = prepare(policy, Ranks(policy.head.device), checkpointing="off", compiled=False)
            assert isinstance(weights, MasterCopies)
            optimizer = adamw(weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
            for number in (1, 2, 3):  # a clipped gradient would depend on the norm's rounding
                samples = make_batch(number).samples
                options = {"row_tokens": 4096, "max_grad_norm": 1e9}
                metrics = one_step(scorer, weights, optimizer, Ranks(policy.head.device), samples, **options)
            assert metrics["grad_norm"] > 0
            assert bool(weights.buffers) == summed
            outcomes.append({name: weights.whole(name).clone() for name in weights.named})
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_leaves_the_gpu_comes_back_and_the_next_step_is_the_same(tiny_directory, make_batch, dtype):
    """All but a few MB is gone meanwhile, also of a model that is not that small."""
    device = torch.device("cuda")
    ballast = torch.randn(64, 1 << 20, device=device)  # 256 MB, as a weight that nobody uses
    outcomes = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for away in (False, True):
            policy = load_policy(str(tiny_directory), device, dtype)
            scorer, weights = prepare(policy, Ranks(device), checkpointing="off", compiled=False)
            optimizer = adamw(weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
            offload, metrics = Offload(device, 1 << 24), []
            for number in (1, 2, 3):
                metrics.append(
                    one_step(scorer, weights, optimizer, Ranks(device), make_batch(number).samples)
                )
                if away:
                    weights.moved()
                    optimizer.moved()
                    everything = [*kept(policy.model, weights, optimizer), ballast]
                    gone = offload.leave(everything, weights.scratch())
                    stays = torch.cuda.memory_reserved()
                    offload.come_back()
                    assert gone > 256e6
                    assert stays < 8e6
            whole = {name: weights.whole(name).clone() for name in weights.named}
            outcomes.append((metrics, whole, float(ballast.sum())))
            del policy, scorer, weights, optimizer, offload
    finally:
        torch.use_deterministic_algorithms(False)
    (plain, before, weight), (moved, after, same) = outcomes
    assert plain == moved
    assert weight == same
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_nccl_carries_weights_in_a_group_of_one():
    assert prove(torch.device("cuda", 0)).count(".") == 2


ONE_GPU = torch.cuda.device_count() < 2
two_processes = pytest.mark.skipif(
    ONE_GPU and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
    reason="one GPU, on which NCCL (2.30 and newer) takes two processes if NCCL_MULTI_RANK_GPU_ENABLE=1",
)


def receiver(unique_id: bytes, buffers: int, size: int, *more: str) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("nccl_receiver.py")
    arguments = [unique_id.hex(), "0" if ONE_GPU else "1", str(buffers), str(size), *more]
    return subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True)


def within(seconds: float) -> Callable[[], str | None]:
    until = time.monotonic() + seconds
    return lambda: f"waited {seconds:g} s" if time.monotonic() > until else None


@two_processes
def test_nccl_carries_weights_to_another_process():
    buffers = [torch.randint(256, (1 << 20,), dtype=torch.uint8, device="cuda") for _ in range(6)]
    unique_id = new_unique_id()
    other = receiver(unique_id, len(buffers), 1 << 20)
    try:
        wire = NcclWire(unique_id, 2, torch.device("cuda", 0), within(60))
        for buffer in buffers:
            wire.broadcast(buffer, within(60))
        wire.finish(within(60))
        got = other.communicate(timeout=60)[0].split()
        wire.leave()
    finally:
        other.kill()
    assert got == [hashlib.sha256(buffer.cpu().numpy().tobytes()).hexdigest() for buffer in buffers]


@two_processes
@pytest.mark.parametrize("gone", ["it hangs", "it is killed"])
def test_nccl_lets_go_of_a_receiver_that_is_gone_in_the_middle(gone):
    """Buffers larger than what NCCL holds on the way, which are not sent unless somebody takes them."""
    size, unique_id = 256 << 20, new_unique_id()
    other = receiver(unique_id, 2, size, "hang")
    try:
        wire = NcclWire(unique_id, 2, torch.device("cuda", 0), within(60))
        buffers = [torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for buffer in buffers:
            wire.broadcast(buffer, within(60))
        assert other.stdout is not None
        assert len({other.stdout.readline() for _ in buffers}) == 1, "both have come"
        if gone == "it is killed":
            other.kill()
            other.wait()
        for buffer in buffers:  # on their way
            wire.broadcast(buffer, within(60))
        with pytest.raises(PeersMissing, match=r"not all of 1 .* have taken what was sent: waited 3 s"):
            wire.finish(within(3))
        wire.leave()
    finally:
        other.kill()
    assert float(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20, "the device does what it is told"
    assert prove(torch.device("cuda", 0)), "and the next group is made"


@two_processes
def test_nccl_says_who_did_not_come():
    """Who waits in a group that is not formed cannot be called off: in a process of its own."""
    script = (
        "import os, torch; from keptset_trainer.nccl_wire import NcclWire, PeersMissing, new_unique_id\n"
        "try: NcclWire(new_unique_id(), 2, torch.device('cuda', 0), iter([None] * 40 + ['2 s']).__next__)\n"
        "except PeersMissing as error: print(error, flush=True); os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "not all of 1 inference worker(s) have joined" in done.stdout, done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_make_the_same_step_however_they_exchange_gradients_and_weights():
    """In processes of their own: NCCL, and recorded backward passes in groups of layers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, Path(__file__).with_name("two_gpus.py")],
        env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain, *others = json.loads(done.stdout.splitlines()[-1])
    assert plain[0][0] == plain[1][0], "both ranks have the same weights"
    for outcomes in others:
        assert [outcome for outcome, _ in outcomes] == [outcome for outcome, _ in plain]
    early = [[times for _, times in outcomes] for outcomes in others]
    assert early[0] == [0, 0]
    assert all(min(times) > 0 for times in early[1:])
