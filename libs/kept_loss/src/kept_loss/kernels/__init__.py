"""Triton kernels: sums of scaled rows, the logits of kept ids, statistics over the whole vocabulary."""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when they were imported): on a CPU,
slowly, and without bfloat16 products, which are then taken in float32."""
