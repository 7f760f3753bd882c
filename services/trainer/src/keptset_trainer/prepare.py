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

from .attention import VARLEN
from .attention_proof import keep_exact_kernels
from .graphs import BodyGraphs, Record
from .master_weights import MasterCopies, MasterWeights, OwnWeights, Shards
from .model import Policy, prove
from .ranks import Ranks
from .scorer import Head, Scorer, kept_head
from .sharded_masters import ShardedMasters

Checkpointing = Literal["off", "selective", "full"]
Sharding = Literal["none", "full", "optimizer"]
SHARE = 0.4
"""Of a GPU's memory that a whole model and what belongs to it may take; activations want the rest."""
RECOMPILATIONS = 64
"""Of one block's code: a type of layer, a number of sequences, equally long or not."""


def prepare(
    policy: Policy,
    ranks: Ranks,
    *,
    checkpointing: Checkpointing,
    compiled: bool,
    head: Head = kept_head,
    sharding: Sharding = "none",
    graphs: Literal["auto", "on", "off"] = "off",
    record: Record | None = None,
    backward_groups: int = 1,
    gather_in_place: bool = False,
) -> tuple[Scorer, MasterWeights]:
    """Prove the policy in the type that it computes in, and wrap its blocks.

    Args:
        policy: loaded, the same on every rank; its parameters' type is what it computes in.
        ranks: among which it is sharded.
        checkpointing: which activations are computed again in the backward pass.
        compiled: whether the blocks are.
        head: what follows the body.
        sharding: what the ranks hold a part of: nothing (one rank), all weights, or what is optimised.
        graphs: whether the body's kernels are recorded as CUDA graphs; "auto" = where that is possible.
        record: what records them instead of CUDA graphs, and then anywhere.
        backward_groups: of layers, which a recorded backward pass goes through one by one; of a step's last
            row the ranks reduce each one's gradients during the next one's. For sharding "optimizer".
        gather_in_place: see `ShardedMasters`.

    Raises:
        ValueError: an architecture that cannot be trained like this.
    """
    assert backward_groups == 1 or sharding == "optimizer"
    prove(policy)
    varlen = policy.head.is_cuda and policy.model.config._attn_implementation == VARLEN
    if varlen and not torch.are_deterministic_algorithms_enabled():  # which leaves these kernels out
        keep_exact_kernels(policy.model.config, policy.head.device, policy.head.dtype)
    groups = policy.groups(backward_groups) if backward_groups > 1 else []
    for block in policy.blocks if compiled or checkpointing != "off" else []:
        block.forward = wrapped(block.forward, checkpointing, compiled)
    scorer = Scorer(policy, head)
    dtype = policy.head.dtype

    def masters() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().float() for name, parameter in policy.model.named_parameters()}

    assert sharding != "none" or ranks.size == 1
    if graphs != "off" and (record or can_record(policy, sharding, strict=graphs == "on")):
        scorer.graphs = BodyGraphs(policy, record, strict=graphs == "on", groups=groups)
    if sharding == "full":
        set_parameters(policy.model, masters())
        shard(scorer, policy.blocks, ranks, dtype)
        return scorer, Shards(policy.model, dtype)
    if sharding == "optimizer":
        join_alone(ranks)
        names = [names_of(policy.model, group) for group in groups]
        weights = ShardedMasters(policy.model, ranks, names, gather_in_place)
        if groups and scorer.graphs is not None:
            scorer.graphs.exchange = weights.exchange
        return scorer, weights
    if dtype == torch.float32:
        return scorer, OwnWeights(policy.model)
    return scorer, MasterCopies(policy.model, masters())


def chosen_sharding(setting: Literal["auto", "full", "optimizer"], policy: Policy, ranks: Ranks) -> Sharding:
    """What `setting` means for this model on these ranks.

    "auto" is "optimizer" on GPUs in half precision where a rank's weights, their gradients and its part of
    the rest take at most SHARE of its memory: two collectives a step instead of several a layer.
    """
    if ranks.size == 1:
        return "none"
    if setting != "auto":
        return setting
    if ranks.device.type != "cuda" or policy.head.dtype == torch.float32:
        return "full"
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    needed = parameters * (2 + 2 + 2 + 4 + 18 / ranks.size)
    room = torch.cuda.get_device_properties(ranks.device).total_memory * SHARE
    return "optimizer" if needed <= room else "full"


def can_record(policy: Policy, sharding: Sharding, strict: bool) -> bool:
    """Whether the body's kernels are always the same ones, in the same memory.

    Raises:
        ValueError: they are not, and it is `strict`.
    """
    attention, dtype = policy.model.config._attn_implementation, policy.head.dtype
    half = dtype in (torch.bfloat16, torch.float16)
    if policy.head.is_cuda and half and attention == VARLEN and sharding != "full":
        return True
    if strict:
        raise ValueError(
            'trainer.cuda_graphs = "on" needs trainer.device = "cuda", trainer.dtype = "bfloat16", trainer.'
            'attention = "varlen" and, on more ranks than one, trainer.sharding = "optimizer"; this is '
            f'{policy.head.device.type}, {dtype}, {attention}, {sharding}; set it to "auto"'
        )
    return False


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


def names_of(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    """The model's names of these modules' parameters."""
    wanted = {id(parameter) for module in modules for parameter in module.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in wanted]


def set_parameters(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Let the model's parameters be `values`, of any type."""
    for name, parameter in model.named_parameters():
        parameter.data = values[name]


def join_alone(ranks: Ranks) -> None:
    """One rank alone may be sharded too, to measure what that costs."""
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if ranks.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )


def shard(scorer: Scorer, blocks: list[nn.Module], ranks: Ranks, dtype: torch.dtype) -> None:
    """FSDP2: float32 shards, gathered block by block in `dtype`; gradients are reduced in float32.

    Embedding, last norm and head are one group with the scorer itself: a tied head is one parameter, whole
    from the forward pass's begin until its gradient is there.
    """
    join_alone(ranks)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    half = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy)
