"""AdamW over the master weights, the gradient's norm, and a step that applies itself only if it is sound."""

from typing import Any

import torch
from torch import Tensor

from .gradient_sums import HAS_TRITON
from .master_weights import MasterWeights
from .ranks import Ranks


class AdamW(torch.optim.AdamW):
    """torch's, with its state; on CUDA a step is one kernel, which also rounds the weights for the model."""

    def __init__(self, parameters: list[Tensor], rounded: list[Tensor] | None, **options: Any) -> None:
        """`rounded`: where each parameter is to be written in half precision, if anywhere."""
        super().__init__(parameters, **options)
        self.rounded = None if rounded is None else dict(zip(parameters, rounded, strict=True))
        self.tables: Any = None
        self.steps: Tensor | None = None
        """Of all parameters; what the state has are its elements."""

    def moved(self) -> None:
        """The tensors lie elsewhere from now on: what is known of their places is not worth keeping."""
        self.tables = None

    def step_if(self, sound: Tensor, clip: Tensor) -> bool:
        """A step with gradients times `clip`, if `sound`; the host does not wait for either.

        Returns:
            Whether the rounded weights were written.
        """
        if HAS_TRITON and self.step_in_one_launch(sound, clip):
            return self.rounded is not None
        for weight in self.param_groups[0]["params"]:  # torch's kernel wants one type
            if weight.grad is not None and weight.grad.dtype != weight.dtype:
                weight.grad = weight.grad.to(weight.dtype)
        # torch's kernel divides by the one and does nothing where the other is 1
        self.grad_scale, self.found_inf = clip.reciprocal(), (~sound).float()
        self.step()
        return False

    @torch.no_grad()
    def step_in_one_launch(self, sound: Tensor, clip: Tensor) -> bool:
        """As `step`, by a kernel of ours; False if some tensor does not fit it, and then nothing was done."""
        from . import many_tensors  # not at the top: Triton need not be installed

        group = self.param_groups[0]
        weights = [p for p in group["params"] if p.grad is not None]
        gradients = [weight.grad for weight in weights]
        rounded = None if self.rounded is None else [self.rounded[weight] for weight in weights]
        if len({gradient.dtype for gradient in gradients}) > 1:
            return False
        if not many_tensors.fits([*weights, *gradients, *(rounded or [])]):
            return False
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {
                    "step": torch.zeros((), device=weight.device),
                    "exp_avg": torch.zeros_like(weight, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
                }
        states = [self.state[weight] for weight in weights]
        if self.tables is None:
            self.tables = many_tensors.Tables()
        many_tensors.adamw_step(
            self.tables,
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            rounded,
            self.advanced(states, sound),
            clip,
            sound,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        return True

    def advanced(self, states: list[dict[str, Tensor]], sound: Tensor) -> Tensor:
        """The number of the step if it is `sound`, counted for all parameters at once."""
        places = [] if self.steps is None else self.steps.unbind()
        if self.steps is None or [state["step"].data_ptr() for state in states] != [
            place.data_ptr() for place in places
        ]:  # new or restored ones
            self.steps = torch.stack([state["step"] for state in states])
            for state, place in zip(states, self.steps.unbind(), strict=True):
                state["step"] = place
        self.steps += sound
        return self.steps


def adamw(
    weights: MasterWeights, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> AdamW:
    """Over the master weights. Shards that hold nothing are left out."""
    parameters = {name: parameter for name, parameter in weights.named.items() if parameter.numel()}
    rounded = weights.rounded and [weights.rounded[name] for name in parameters]
    fused = next(iter(parameters.values())).is_cuda or None
    return AdamW(
        list(parameters.values()),
        rounded,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        fused=fused,
    )


def clip_and_step(
    optimizer: torch.optim.Optimizer, ranks: Ranks, max_grad_norm: float, faults: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """Clip the gradient by its norm over all ranks, and apply it unless something is not finite.

    Args:
        optimizer: of this rank's shards, whose gradients are there.
        ranks: which have the others.
        max_grad_norm: to which the gradient is clipped.
        faults: how many numbers of this rank are not finite, a float64 scalar on the device.

    Returns:
        On the device: the norm before clipping, and whether the step was applied. On CUDA the host does not
        wait for either. And whether the weights in half precision were written.
    """
    gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    square = total_norm(gradients, faults.device).double().square()
    square, faults = ranks.add_up(torch.stack([square, faults])).unbind()
    norm = square.sqrt().float()
    sound = torch.isfinite(norm) & (faults == 0)
    clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    if isinstance(optimizer, AdamW) and optimizer.defaults["fused"]:
        return norm, sound, optimizer.step_if(sound, clip)
    if sound:
        torch._foreach_mul_(gradients, clip)
        optimizer.step()
    return norm, sound, False


def total_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Over all of them, a float32 scalar; torch's `get_total_norm` rounds each one's to its own type."""
    if not gradients:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
