"""AdamW over the master weights, the gradient's norm, and a step that applies itself only if it is sound."""

import torch
from torch import Tensor

from .master_weights import MasterWeights
from .ranks import Ranks


def adamw(
    weights: MasterWeights, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused on CUDA; on a CPU parameter by parameter. Shards that hold nothing are left out."""
    parameters = [parameter for parameter in weights.named.values() if parameter.numel()]
    fused = parameters[0].is_cuda or None
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)


def clip_and_step(
    optimizer: torch.optim.AdamW, ranks: Ranks, max_grad_norm: float, faults: Tensor
) -> tuple[Tensor, Tensor]:
    """Clip the gradient by its norm over all ranks, and apply it unless something is not finite.

    Args:
        optimizer: of this rank's shards, whose gradients are there.
        ranks: which have the others.
        max_grad_norm: to which the gradient is clipped.
        faults: how many numbers of this rank are not finite, a float64 scalar on the device.

    Returns:
        On the device: the norm before clipping, and whether the step was applied. On CUDA the host does not
        wait for either.
    """
    gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).double().square()
    square, faults = ranks.add_up(torch.stack([square, faults])).unbind()
    norm = square.sqrt().float()
    sound = torch.isfinite(norm) & (faults == 0)
    clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    if optimizer.defaults["fused"]:  # the kernel divides by the one and does nothing where the other is 1
        optimizer.grad_scale, optimizer.found_inf = clip.reciprocal(), (~sound).float()
        optimizer.step()
    elif sound:
        torch._foreach_mul_(gradients, clip)
        optimizer.step()
    return norm, sound
