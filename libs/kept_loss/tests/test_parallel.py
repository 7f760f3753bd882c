"""A head whose rows lie on two ranks (gloo, on the CPU) gives what the whole head gives."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kept_loss import KeptSet, dense_kept_logprobs, parallel_kept_logprobs

from .bounds import TOLERANCE, error_bounds, excess

Maker = Callable[..., Any]
PATIENCE = 200.0
OPTIONS: list[dict[str, Any]] = [
    {"full_logprobs": True},
    {"softcap": 4.0, "entropy": 0.5},
    {"entropy": None},
]


def on_two_ranks(work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns on each, as nested lists of floats."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
            )
            answer: Any = work(rank, *arguments)
            dist.destroy_process_group()
        except BaseException:
            answer = traceback.format_exc()
        pipes[rank][1].send(answer)

    processes = [context.Process(target=one, args=(rank,), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    answers = []
    for reader, _ in pipes:
        assert reader.poll(PATIENCE), f"a rank did not answer within {PATIENCE} s"
        answers.append(reader.recv())
    for process in processes:
        process.join(PATIENCE)
    failures = [answer for answer in answers if isinstance(answer, str)]
    assert not failures, "\n".join(failures)
    return answers


def arrays(tensors: Any) -> list[Any]:
    """Arrays, which go through a pipe; None stays."""
    return [None if tensor is None else tensor.detach().double().numpy() for tensor in tensors]


def sharded(rank: int, problem: Any, border: int, dtype: torch.dtype) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    results = []
    for options in OPTIONS:
        hidden, weight, labels, kept, heat = problem.arguments(dtype)
        part = weight.detach()[:border] if rank == 0 else weight.detach()[border:]
        part = part.clone().requires_grad_()
        out = parallel_kept_logprobs(hidden, part, labels, kept, heat, group, **options)
        grads = torch.autograd.grad(out.logprobs, (hidden, part), problem.grad.to(out.logprobs.dtype))
        results.append(arrays([*out, *grads]))
    return results


@pytest.mark.parametrize("border", [17, 50])
@pytest.mark.parametrize("masked", [0.0, 0.7, 1.0])
def test_equals_the_whole_head(
    new_problem: Maker, grads_of: Maker, tmp_path: Path, masked: float, border: int
) -> None:
    problem = new_problem(3, 40, 50, 16, masked=masked)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, TOLERANCE)):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        shares = on_two_ranks(sharded, folder, problem, border, dtype)
        for number, options in enumerate(OPTIONS):
            exact = problem.arguments(torch.float64)
            want = dense_kept_logprobs(*exact, **options)
            bounds = error_bounds(problem, options.get("softcap"), tolerance=tolerance)
            grads = grads_of(want, *exact[:2], problem.grad)
            results = [
                [None if x is None else torch.from_numpy(x) for x in share[number]] for share in shares
            ]
            for got in results:
                for name, mine, theirs in zip(want._fields, got, want, strict=False):
                    assert (mine is None) == (theirs is None), name
                    if mine is not None and theirs is not None:
                        assert excess(mine, theirs, bounds.outputs) <= 1, name
                assert excess(got[5], grads[0], bounds.hidden) <= 1
            assert excess(torch.cat([got[6] for got in results]), grads[1], bounds.weight) <= 1


def refused(rank: int, problem: Any) -> str:
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, labels, _, heat = problem.arguments(torch.float32)
    labels = labels.clone()
    labels[2] = 50
    part = weight[:20] if rank == 0 else weight[20:]
    whole = KeptSet.whole_vocabulary(len(labels))
    try:
        parallel_kept_logprobs(hidden, part, labels, whole, heat, group)
    except ValueError as error:
        return f"refused: {error}"
    return "taken"


def test_ids_are_those_of_the_whole_vocabulary(new_problem: Maker, tmp_path: Path) -> None:
    problem = new_problem(3, 40, 50, 16, masked=0.0)
    with pytest.raises(AssertionError, match="labels: at position 2: 50 is outside the vocabulary of 50"):
        on_two_ranks(refused, tmp_path, problem)
