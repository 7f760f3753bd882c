"""Memory that leaves its device and comes back: tensors, views and the next step stay the same to the bit."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keptset_trainer.model import Policy, load_policy
from keptset_trainer.offload import Offload, storages
from keptset_trainer.one_gpu import kept
from keptset_trainer.optimizer import adamw
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks

from .one_step import one_step
from .test_ranks import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def leave_the_group_of_one():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def with_memory_of_its_own(policy: Policy) -> Policy:
    """On a CPU what was loaded lies in a file that is mapped, which cannot shrink; on a GPU never."""
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.clone()
    return policy


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 64))
def test_whatever_the_sizes_all_comes_back_as_it_was(sizes, chunk):
    tensors = [torch.randn(size) for size in sizes]
    before = [tensor.clone() for tensor in tensors]
    offload = Offload(CPU, chunk)
    for _ in range(2):
        gone = offload.leave(tensors)
        stays = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert (gone, stays, offload.come_back()) == (4 * sum(sizes), 0, 4 * sum(sizes))
        assert all(map(torch.equal, tensors, before))
    assert sum(map(len, offload.host)) < 4 * sum(sizes) + chunk, "the host's memory is used again"


def test_who_shares_memory_shares_it_afterwards():
    whole = torch.arange(12.0)
    rows, leaf = whole.view(3, 4), whole[4:8].requires_grad_()
    module = nn.Linear(4, 3, bias=False)
    module.weight.data = rows
    offload = Offload(CPU)
    gone = offload.leave([whole, rows, leaf, module.weight])
    offload.come_back()
    assert gone == 48, "once"
    assert torch.equal(whole, torch.arange(12.0))
    with torch.no_grad():
        leaf += 100
    assert module.weight[1].tolist() == [104, 105, 106, 107]
    assert leaf.requires_grad


def test_scratch_comes_back_as_zeros_unless_it_is_kept_too():
    both, scratch = torch.ones(6), torch.ones(5)
    offload = Offload(CPU)
    offload.leave([both], [both[:3], scratch])
    stays = scratch.untyped_storage().nbytes()
    offload.come_back()
    assert stays == 0
    assert both.tolist() == [1] * 6
    assert scratch.tolist() == [0] * 5


def test_what_is_on_another_device_stays_there():
    here, elsewhere = torch.ones(3), torch.ones(3, device="meta")
    assert len(storages([here, elsewhere], CPU)) == 1


KINDS: dict[str, dict[str, Any]] = {
    "own weights": {"dtype": "float32"},
    "float32 beside bfloat16": {"dtype": "bfloat16"},
    "all weights sharded": {"dtype": "float32", "sharding": "full"},
    "the optimiser sharded": {"dtype": "bfloat16", "sharding": "optimizer"},
}


def bytes_alive(but: set[int]) -> tuple[int, set[int]]:
    """Of all tensors that there are but these, known by their storages; and which they are."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    found = {one._cdata: one.nbytes() for one in storages(tensors, CPU) if one._cdata not in but}
    return sum(found.values()), set(found)


def steps(ranks: Ranks, directory: Path, batches: list[Any], kind: str, away: bool) -> Any:
    """Metrics of some steps and the weights after them; between two of them all leaves, if `away`."""
    options = dict(KINDS[kind])
    _, others = bytes_alive(set())
    policy = with_memory_of_its_own(load_policy(str(directory), ranks.device, options.pop("dtype")))
    scorer, weights = prepare(policy, ranks, checkpointing="off", compiled=False, **options)
    optimizer = adamw(weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    offload, metrics = Offload(ranks.device, chunk=1 << 12), []
    for batch in batches:
        if away:
            weights.drop_gradients()
            weights.moved()
            optimizer.moved()
            everything = kept(policy.model, weights, optimizer)
            gone = offload.leave(everything, weights.scratch())
            on_host = {one._cdata for one in storages(offload.host, CPU)}
            stays, _ = bytes_alive(others | on_host)
            offload.come_back()  # before anything is said of tensors without memory
            assert gone > 50_000
            assert stays < 2_000, "all that is large has left"
        metrics.append(one_step(scorer, weights, optimizer, ranks, batch.samples, max_grad_norm=0.5))
    return metrics, {name: weights.whole(name).float().numpy().tobytes() for name in weights.named}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_same_bit_for_bit(kind, tiny_directory, make_batch):
    batches = [make_batch(step) for step in (1, 2, 3)]
    alone = Ranks(CPU)
    assert steps(alone, tiny_directory, batches, kind, True) == steps(
        alone, tiny_directory, batches, kind, False
    )


@pytest.mark.parametrize("kind", ["all weights sharded", "the optimiser sharded"])
def test_steps_of_two_ranks_are_the_same_bit_for_bit(kind, tiny_directory, make_batch, tmp_path):
    batches = [make_batch(step) for step in (1, 2)]
    both = []
    for away in (True, False):
        folder = tmp_path / str(away)
        folder.mkdir()
        both.append(on_ranks(2, steps, folder, tiny_directory, batches, kind, away))
    assert both[0] == both[1]
