"""The V2 model runner's hook for requests that want sets: who may ask, and what they never sample."""

from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from .flag import check_mark, is_marked
from .padding import known_ids


class NativeRows(LogitsProcessor):
    """Masks out, in marked rows, the ids that the tokenizer does not have."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called for every request of every route, in the process of the API."""
        check_mark(sampling_params)

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        """VLLM's signature."""
        import torch
        from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor  # not in the process of the API

        self.limit, self.vocabulary = known_ids(vllm_config), req_states.vocab_size
        self.marked = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.int32)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether its logits are changed."""
        self.marked.np[req_idx] = is_marked(sampling_params) and self.limit < self.vocabulary
        return bool(self.marked.np[req_idx])

    def apply_staged_writes(self) -> None:
        """Once a step."""
        self.marked.copy_to_uva()

    def apply(self, logits: Any, ctx: LogitsContext) -> Any:
        """float32 [rows, V]; changed in place, in marked rows only."""
        if np.any(self.marked.np[ctx.idx_mapping_np]):
            rows = self.marked.gpu[ctx.expanded_idx_mapping] != 0
            logits[:, self.limit :].masked_fill_(rows[:, None], -float("inf"))
        return logits


__all__ = ["NativeRows"]
