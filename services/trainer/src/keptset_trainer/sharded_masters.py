"""Whole models on every rank, of which each optimises a part (ZeRO-2, Rajbhandari et al. 2020).

Ranks exchange two things a step: the gradients' sum, of which each rank gets its part, and the new weights in
half precision. Parts are those of DTensor's Shard(0), so that checkpoints are those of FSDP2.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor, Shard

from .gradient_sums import GradientSums
from .ranks import Ranks

# torch 2.13 gave them other names
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


ALIGNMENT = 64
"""Elements; where a parameter's piece may begin."""


class ShardedMasters:
    """float32 of this rank's rows of every parameter, beside a whole model in half precision."""

    averages = 1

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        groups: Sequence[Iterable[str]] = (),
        gather_in_place: bool = False,
    ) -> None:
        """Masters of a model that is the same on every rank.

        Args:
            model: whole.
            ranks: which share its masters.
            groups: names of parameters that `exchange` may be called for, in this order.
            gather_in_place: new weights go straight into the model where its memory has the ranks' pieces
                one behind the other, which saves a copy of them.
        """
        self.ranks = ranks
        self.model: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        pieces = {name: pieces_of(parameter.shape, ranks.size) for name, parameter in self.model.items()}
        sizes = {name: piece.stop - piece.start for name, (piece, *_) in pieces.items()}
        device, dtype = ranks.device, next(iter(self.model.values())).dtype

        grouped = [list(group) for group in groups]
        early = {name for group in grouped for name in group}
        grouped.append([name for name in self.model if name not in early])
        starts, total = side_by_side([name for group in grouped for name in group], sizes)
        # For each group one row a rank, in which it has a piece of every parameter of the group.
        self.sums = torch.zeros(ranks.size * total, dtype=torch.float32, device=device)
        self.own = torch.zeros(total, dtype=torch.float32, device=device)
        self.gradient = torch.zeros(total, dtype=torch.float32, device=device)
        borders = [*(starts[group[0]] for group in grouped if group), total]
        self.groups = [
            Group(
                {name: self.model[name] for name in group},
                {name: (pieces[name], starts[name] - start) for name in group},
                self.sums[ranks.size * start : ranks.size * stop].view(ranks.size, -1),
                self.gradient[start:stop],
            )
            for group, (start, stop) in zip(filter(None, grouped), pairwise(borders), strict=True)
        ]

        # Vectors are small, and a gather each would take longer than a copy.
        direct = [
            name
            for name, parameter in self.model.items()
            if gather_in_place and parameter.dim() > 1 and parameter.shape[0] % ranks.size == 0
        ]
        together = [name for name in self.model if name not in set(direct)]
        places, all_of_it = side_by_side([*together, *direct], sizes)
        shared = places[direct[0]] if direct else all_of_it
        self.own_rounded = torch.zeros(all_of_it, dtype=dtype, device=device)
        self.gathered = torch.zeros(ranks.size, shared, dtype=dtype, device=device)
        self.gathers = [(self.gathered.view(-1), self.own_rounded[:shared])] if together else []
        self.gathers += [
            (self.model[name].detach().view(-1), self.own_rounded[places[name] :][: sizes[name]])
            for name in direct
        ]
        copies = [
            (self.model[name].detach().view(-1)[piece], self.gathered[rank, places[name] :][: length(piece)])
            for name in together
            for rank, piece in enumerate(pieces[name])
            if length(piece)
        ]
        self.copied = [list(side) for side in zip(*copies, strict=True)]

        self.named: dict[str, Tensor] = {}
        self.rounded: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        for name, parameter in self.model.items():
            part = parameter.detach().view(-1)[pieces[name][ranks.rank]]
            shape = (part.numel() // parameter.shape[1:].numel(), *parameter.shape[1:])
            self.own[starts[name] :][: part.numel()] = part
            self.named[name] = self.own[starts[name] :][: part.numel()].view(shape).requires_grad_()
            self.own_rounded[places[name] :][: part.numel()] = part  # what no step writes is gathered as well
            self.rounded[name] = self.own_rounded[places[name] :][: part.numel()].view(shape)
            self.gradients[name] = self.gradient[starts[name] :][: part.numel()].view(shape)
        self.rows = 0
        """That were added up so far."""
        self.under_way: list[dist.Work] = []
        """What was begun of the groups, in their order, before the row's backward pass was over."""

    def exchange(self, group: int) -> None:
        """In a step's last backward pass: the gradients of this group are complete, begin to reduce them.

        The ranks need not agree on what is begun early: all reduce the groups in the same order.
        """
        assert group == len(self.under_way)
        self.groups[group].add(self.rows == 0)
        self.under_way.append(self.groups[group].reduce(async_op=True))

    @torch.no_grad()
    def add_up(self, only: bool = False) -> None:
        for group in self.groups[len(self.under_way) :]:
            group.add(self.rows == 0)
        self.rows += 1

    def collect(self) -> None:
        assert self.rows
        for work in self.under_way:
            work.wait()
        for group in self.groups[len(self.under_way) :]:
            group.reduce()
        self.under_way = []
        for name, master in self.named.items():
            master.grad = self.gradients[name] if self.model[name].requires_grad else None

    @torch.no_grad()
    def give_back(self, rounded: bool = False) -> None:
        if not rounded:
            torch._foreach_copy_(list(self.rounded.values()), list(self.named.values()))
        with _coalescing_manager():
            for whole, part in self.gathers:
                all_gather(whole, part)
        if self.copied:
            torch._foreach_copy_(*self.copied)

    def drop_gradients(self) -> None:
        assert not self.under_way
        self.rows = 0
        for name, master in self.named.items():
            master.grad = self.model[name].grad = None

    def as_sharded(self, name: str, values: Tensor) -> Tensor:
        whole = self.model[name]
        return DTensor.from_local(
            values, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def whole(self, name: str) -> Tensor:
        return self.model[name].detach()

    def held(self) -> list[Tensor]:
        return [self.own, self.own_rounded]

    def scratch(self) -> list[Tensor]:
        return [self.sums, self.gathered, self.gradient]

    def moved(self) -> None:
        for group in self.groups:
            group.adder = GradientSums()


class Group:
    """Parameters whose gradients are added up and reduced in one go."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        pieces: dict[str, tuple[list[slice], int]],
        sums: Tensor,
        gradient: Tensor,
    ) -> None:
        """`pieces`: the ranks' elements of each parameter, and where their sums are in a row of `sums`."""
        self.parameters, self.sums, self.gradient = parameters, sums, gradient
        self.pieces = [
            (name, piece) for name, (by_rank, _) in pieces.items() for piece in by_rank if length(piece)
        ]
        self.sum_pieces = [
            sums[rank, place:][: length(piece)]
            for by_rank, place in pieces.values()
            for rank, piece in enumerate(by_rank)
            if length(piece)
        ]
        self.adder = GradientSums()

    @torch.no_grad()
    def add(self, fresh: bool) -> None:
        """Take the parameters' gradients: their sums are these if `fresh`, else they are added to them."""
        flat = {
            name: torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1)
            for name, p in self.parameters.items()
        }
        self.adder.add([flat[name][piece] for name, piece in self.pieces], self.sum_pieces, fresh)
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce(self, async_op: bool = False) -> dist.Work | None:
        """This rank's part of the sums over all ranks."""
        work: dist.Work | None = reduce_scatter(self.gradient, self.sums.view(-1), async_op=async_op)
        return work


def pieces_of(shape: torch.Size, ranks: int) -> list[slice]:
    """Elements of a parameter that each rank has: whole rows, as torch.chunk deals them out."""
    rows, size = shape[0], shape[1:].numel()
    chunk = -(-rows // ranks)
    ends = [min(rows, rank * chunk) * size for rank in range(ranks + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def length(piece: slice) -> int:
    """Elements of it."""
    return int(piece.stop - piece.start)


def side_by_side(names: Iterable[str], sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each begins in memory that has room for all, and the size of that, in elements."""
    starts, total = {}, 0
    for name in names:
        starts[name] = total
        total += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
    return starts, total
