"""Make a loaded policy ready to train: precision, checkpointing, compilation, sharding, in this order."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .master_weights import MasterCopies, MasterWeights, OwnWeights, Shards
from .model import Policy, prove
from .ranks import Ranks
from .scorer import Head, Scorer, kept_head

Checkpointing = Literal["off", "selective", "full"]
RECOMPILATIONS = 64
"""Of one block's code: a type of layer, a number of sequences, equally long or not."""


def prepare(
    policy: Policy,
    ranks: Ranks,
    *,
    checkpointing: Checkpointing,
    compiled: bool,
    head: Head = kept_head,
    sharded: bool | None = None,
) -> tuple[Scorer, MasterWeights]:
    """Prove the policy in the type that it computes in, and wrap its blocks.

    Args:
        policy: loaded, the same on every rank; its parameters' type is what it computes in.
        ranks: among which it is sharded.
        checkpointing: which activations are computed again in the backward pass.
        compiled: whether the blocks are.
        head: what follows the body.
        sharded: FSDP2; None = if there is more than one rank.

    Raises:
        ValueError: an architecture that cannot be trained like this.
    """
    prove(policy)
    for block in policy.blocks if compiled or checkpointing != "off" else []:
        block.forward = wrapped(block.forward, checkpointing, compiled)
    scorer = Scorer(policy, head)
    dtype = policy.head.dtype
    masters = {name: parameter.detach().float() for name, parameter in policy.model.named_parameters()}
    if ranks.size > 1 if sharded is None else sharded:
        set_parameters(policy.model, masters)
        shard(scorer, policy.blocks, ranks, dtype)
        return scorer, Shards(policy.model, dtype)
    if dtype == torch.float32:
        return scorer, OwnWeights(policy.model)
    return scorer, MasterCopies(policy.model, masters)


def wrapped(forward: Callable[..., Any], checkpointing: Checkpointing, compiled: bool) -> Callable[..., Any]:
    """A block's forward, compiled and with its activations computed again where that is asked for."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # there is no dropout
    if checkpointing == "selective":
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        forward = partial(again, forward, context_fn=contexts)
    if compiled:
        torch._dynamo.config.recompile_limit = RECOMPILATIONS
        torch._dynamo.config.accumulated_recompile_limit = 4 * RECOMPILATIONS
        forward = torch.compile(forward)
    if checkpointing == "full":
        forward = partial(again, forward)
    return forward


PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.keptset.varlen_attention.default,
}


def keep_products(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Selective checkpointing: what a matmul or attention gave is kept, the rest is cheap to have again."""
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def set_parameters(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Let the model's parameters be `values`, of any type."""
    for name, parameter in model.named_parameters():
        parameter.data = values[name]


def shard(scorer: Scorer, blocks: list[nn.Module], ranks: Ranks, dtype: torch.dtype) -> None:
    """FSDP2: float32 shards, gathered block by block in `dtype`; gradients are reduced in float32.

    Embedding, last norm and head are one group with the scorer itself: a tied head is one parameter, whole
    from the forward pass's begin until its gradient is there.
    """
    if not dist.is_initialized():  # one rank alone, to measure what sharding costs
        dist.init_process_group(
            "nccl" if ranks.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    half = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy)
