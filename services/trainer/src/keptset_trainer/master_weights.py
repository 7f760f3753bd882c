"""The float32 weights that the optimiser changes, whatever the model computes in and wherever it lies.

Three kinds with the same methods: the model's own parameters (one rank, float32), float32 copies of a model
in half precision (one rank), and this rank's shards (FSDP2).
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .gradient_sums import GradientSums, kernels_take


class MasterWeights(Protocol):
    """What the optimiser, the checkpoint and the export see."""

    named: dict[str, Tensor]
    """float32 leaves, by the model's names of them; shards if the model is sharded."""
    averages: int
    """Ranks over which `collect` takes the gradients' mean, as FSDP does; 1: it takes their sum."""
    rounded: dict[str, Tensor] | None
    """Where the optimiser may write each of them in half precision too, which is less work than a copy."""

    def add_up(self, only: bool = False) -> None:
        """After each row's backward: add its gradients to those of the rows before, in float32.

        `only`: it is the step's only row, and its gradients may be left as they are.
        """

    def collect(self) -> None:
        """After a step's last row: put the gradients where the optimiser looks."""

    def give_back(self, rounded: bool = False) -> None:
        """After the optimiser's step, which may have written `rounded`: let the model have the weights."""

    def drop_gradients(self) -> None:
        """Forget all gradients."""

    def as_sharded(self, name: str, values: Tensor) -> Tensor:
        """`values`, of the shape of `named[name]`, as the part of the whole that they are."""

    def whole(self, name: str) -> Tensor:
        """What the model computes with, in its type, unsharded. Every rank must ask."""

    def held(self) -> list[Tensor]:
        """What the next step reads, beside the model's parameters and `named`."""

    def scratch(self) -> list[Tensor]:
        """Memory that is kept from step to step, in which the next step finds what it needs if it is 0."""

    def moved(self) -> None:
        """All these tensors lie elsewhere from now on."""


class NothingBeside:
    """Of masters that hold no tensors but those of `named` and of the model."""

    def held(self) -> list[Tensor]:
        return []

    def scratch(self) -> list[Tensor]:
        return []

    def moved(self) -> None:
        pass


class OwnWeights(NothingBeside):
    """The parameters of a model in float32 are their own masters."""

    averages = 1
    rounded = None

    def __init__(self, model: nn.Module) -> None:
        self.named: dict[str, Tensor] = dict(model.named_parameters())

    def add_up(self, only: bool = False) -> None:
        pass  # autograd has done it

    def collect(self) -> None:
        pass

    def give_back(self, rounded: bool = False) -> None:
        pass

    def drop_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def as_sharded(self, name: str, values: Tensor) -> Tensor:
        return values

    def whole(self, name: str) -> Tensor:
        return self.named[name].detach()


class MasterCopies:
    """float32 beside a model in half precision; gradients of several rows add up in float32."""

    averages = 1

    def __init__(self, model: nn.Module, masters: dict[str, Tensor]) -> None:
        """`masters` are float32 and are changed from here on; they must round to the model's parameters."""
        self.model = dict(model.named_parameters())
        assert self.model.keys() == masters.keys()
        self.named: dict[str, Tensor] = {name: master.requires_grad_() for name, master in masters.items()}
        for master in self.named.values():
            master.grad_dtype = None  # any: that of a step's only row is the model's
        self.rounded = {name: parameter.detach() for name, parameter in self.model.items()}
        self.buffers: dict[str, Tensor] = {}
        """Memory of the masters' gradients, kept from step to step."""
        self.sums = GradientSums()

    @torch.no_grad()
    def add_up(self, only: bool = False) -> None:
        gradients = {name: p.grad for name, p in self.model.items() if p.grad is not None}
        if only and kernels_take(list(gradients.values())):  # as AdamW does, without a sum in float32
            for name, gradient in gradients.items():
                self.named[name].grad, self.model[name].grad = gradient, None
            return
        new = {name for name in gradients if self.named[name].grad is None}
        for name in new:
            if name not in self.buffers:
                self.buffers[name] = torch.empty_like(self.named[name])
            self.named[name].grad = self.buffers[name]
        for names in (new, gradients.keys() - new):
            ordered = sorted(names)
            self.sums.add(
                [gradients[name] for name in ordered], [self.buffers[name] for name in ordered], names is new
            )
        for name in gradients:
            self.model[name].grad = None

    def collect(self) -> None:
        pass

    @torch.no_grad()
    def give_back(self, rounded: bool = False) -> None:
        if not rounded:
            torch._foreach_copy_(list(self.model.values()), list(self.named.values()))

    def drop_gradients(self) -> None:
        for name, master in self.named.items():
            master.grad = self.model[name].grad = None

    def as_sharded(self, name: str, values: Tensor) -> Tensor:
        return values

    def whole(self, name: str) -> Tensor:
        return self.model[name].detach()

    def held(self) -> list[Tensor]:
        return []

    def scratch(self) -> list[Tensor]:
        return list(self.buffers.values())

    def moved(self) -> None:
        self.sums = GradientSums()


class Shards(NothingBeside):
    """This rank's part of every parameter of a model that FSDP2 has sharded, as plain tensors.

    Plain, because an optimiser step elementwise over shards is that over the whole, and DTensor's dispatch
    costs the host more than the step costs the GPU.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """`dtype`: what the model computes in."""
        self.rounded = None
        self.parts: dict[str, DTensor] = {}
        self.dtype = dtype
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            self.parts[name] = parameter
        self.averages = next(iter(self.parts.values())).device_mesh.size()
        # the shard's memory under another name, so that it may carry a plain gradient
        self.named: dict[str, Tensor] = {
            name: part.to_local().detach().requires_grad_() for name, part in self.parts.items()
        }

    def add_up(self, only: bool = False) -> None:
        pass  # FSDP has done it

    def collect(self) -> None:
        for name, part in self.parts.items():
            assert part.grad is None or isinstance(part.grad, DTensor)
            self.named[name].grad = None if part.grad is None else part.grad.to_local()

    def give_back(self, rounded: bool = False) -> None:
        pass  # the next forward gathers the shards

    def drop_gradients(self) -> None:
        for name, part in self.parts.items():
            part.grad = self.named[name].grad = None

    def as_sharded(self, name: str, values: Tensor) -> Tensor:
        part = self.parts[name]
        return DTensor.from_local(
            values, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
        )

    def whole(self, name: str) -> Tensor:
        return self.parts[name].detach().full_tensor().to(self.dtype)
