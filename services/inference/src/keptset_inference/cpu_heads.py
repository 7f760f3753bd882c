"""A head tied to the embedding goes stale on a CPU when weights are loaded again; this makes it anew.

On a CPU vLLM computes with a packed copy of each matrix. Loading weights again (`reload_weights`) packs those
that the files name. A tied head is not named: its weight is the embedding's and changes with it, but its
packed copy stays the old one, and every logit is that of the new layers under the old head (measured: log
ratios up to 0.3 after thirty steps of the demo).
"""

from typing import Any

from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

TOLERANCE = 1e-2
"""Of the largest product: far above the rounding of bfloat16, far below the step between two versions of a
matrix that matter."""


def pack_heads(model: Any) -> None:
    """Pack every unquantised head of the model from the weight that it holds now, and see that it computes
    with it.

    Raises:
        RuntimeError: a head computes with something else than its weight.
    """
    for name, head in model.named_modules():
        if isinstance(head, ParallelLMHead) and isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
            _prove(name, head)


def _prove(name: str, head: ParallelLMHead) -> None:
    width = head.weight.shape[1]
    hidden = head.weight.new_zeros(min(8, width), width).fill_diagonal_(1)
    got = head.quant_method.apply(head, hidden).float()
    wanted = (hidden @ head.weight.T).float()
    worst = float((got - wanted).abs().max())
    if not worst <= TOLERANCE * max(float(wanted.abs().max()), 1e-30):
        raise RuntimeError(
            f"{name} does not compute with the weights that were loaded (off by {worst:g}): "
            "restart the server to load them from the start"
        )
