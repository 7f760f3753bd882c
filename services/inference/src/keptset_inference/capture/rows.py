"""Who in the batch wants a kept set: a logits processor, vLLM's official hook for per-request state.

vLLM builds it in the process that samples, tells it every row that is added, moved or removed, and calls
`apply` after temperature and min_p, before its own top-k and top-p.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from .bounds import widest_set
from .flag import WIDTH, check_mark, is_marked
from .ties import keep_top_k


class KeptRows(LogitsProcessor):
    """Makes the rows that want a kept set small enough to be recorded: exactly, before anything is
    sampled.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called for every request of every route, in the process of the API."""
        check_mark(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """VLLM's signature."""
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.device, self.pin = device, is_pin_memory
        self.widths = np.zeros(vllm_config.scheduler_config.max_num_seqs, np.int64)
        """Per row of the batch the most ids that its set may have; 0 = wants no set."""
        self.armed = False
        """True while a sampler that reads the sets is at work. Without one rows are left alone, no set
        arrives and the request fails: better than an answer whose sets nobody read."""
        self._place()

    def is_argmax_invariant(self) -> bool:
        """The largest logit survives; greedy rows are never marked."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch. The order matters: removed, added, moved."""
        if batch_update is None:
            return
        highest = max(
            [
                batch_update.batch_size,
                *(row for row, *_ in batch_update.added),
                *(max(a, b) for a, b, _ in batch_update.moved),
            ]
        )
        if highest >= len(self.widths):
            self.widths = np.pad(self.widths, (0, highest + 1 - len(self.widths)))
        widths = self.widths
        for row in batch_update.removed:
            widths[row] = 0
        for row, params, _, _ in batch_update.added:
            widths[row] = self._width(params)
        for a, b, direction in batch_update.moved:
            if direction == MoveDirectionality.SWAP:
                widths[a], widths[b] = widths[b], widths[a]
            else:
                widths[b], widths[a] = widths[a], 0
        self._place()

    def apply(self, logits: Tensor) -> Tensor:
        """float32 [R, V], already divided by the temperature; changed in place, in marked rows only."""
        if not self.count or not self.armed:
            return logits
        if self.count == logits.shape[0]:
            return keep_top_k(logits, self.top_k, self.widest)
        logits[self.rows] = keep_top_k(logits[self.rows], self.top_k, self.widest)
        return logits

    def _width(self, params: SamplingParams) -> int:
        if not is_marked(params):
            return 0
        width = widest_set(params, self.vocabulary)
        assert width <= WIDTH, f"a request whose set may have {width} ids came through"
        return width

    def _place(self) -> None:
        """Put the marked rows on the device; only when the batch changed."""
        rows = np.flatnonzero(self.widths)
        self.count = len(rows)
        self.widest = int(self.widths.max(initial=0))
        self.rows = self._to_device(rows)
        self.top_k = self._to_device(self.widths[rows])

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values.astype(np.int64))
        return (tensor.pin_memory() if self.pin else tensor).to(self.device, non_blocking=True)
