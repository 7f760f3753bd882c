"""Run by test_cuda.py under torchrun: steps of a small model, in several ways; prints what came of each.

torchrun --nproc-per-node 2 two_gpus.py [DEVICE]
"""

import hashlib
import json
import sys

import numpy as np
import torch
from one_step import one_step
from transformers import AutoModelForCausalLM

from conftest import rollout, tiny_config
from keptset_trainer.attention import VARLEN
from keptset_trainer.graphs import done_again
from keptset_trainer.model import Policy
from keptset_trainer.optimizer import adamw
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks, join, leave

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
WAYS = [
    {}, {"gather_in_place": True}, {"backward_groups": 2}, {"backward_groups": 4}, {"backward_groups": 4},
]  # fmt: skip
STEPS = 4


def outcome(ranks: Ranks, way: dict[str, object]) -> tuple[object, int]:
    """Metrics and the weights' hash; how often a group was reduced early."""
    torch.manual_seed(0)
    config = tiny_config(**SIZES, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=VARLEN)
    torch.manual_seed(0)
    numbers, scored_by = np.random.default_rng(0), AutoModelForCausalLM.from_config(tiny_config(**SIZES))
    samples = [rollout(scored_by, numbers, str(index), masked=index % 3 != 0) for index in range(12)]
    policy = Policy(model.to(ranks.device).eval(), None)
    scorer, weights = prepare(
        policy, ranks, checkpointing="off", compiled=False, sharding="optimizer", graphs="on",
        record=None if ranks.device.type == "cuda" else done_again, **way,
    )  # fmt: skip
    early = []
    if scorer.graphs.exchange is not None:
        exchange = scorer.graphs.exchange
        scorer.graphs.exchange = lambda group: (early.append(group), exchange(group))
    optimizer = adamw(weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    metrics = [one_step(scorer, weights, optimizer, ranks, samples) for _ in range(STEPS)]
    digest = hashlib.sha256()
    for name in weights.named:
        digest.update(weights.whole(name).float().cpu().numpy().tobytes())
    assert scorer.graphs.recorded
    return (metrics, digest.hexdigest()), len(early)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ranks = join(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    found = [ranks.gathered(outcome(ranks, way)) for way in WAYS]
    if ranks.is_first:
        print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
