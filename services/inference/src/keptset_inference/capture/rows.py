"""Who in the batch wants a kept set: a logits processor, vLLM's official hook for per-request state.

vLLM builds it in the process that samples, tells it every row that is added, moved or removed, and calls
`apply` after temperature and min_p, in the place of its own top-k and top-p (see `KeptRows.without_cuts`).
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata

from .bounds import widest_set
from .cut import cut_rows
from .flag import WIDTH, check_mark, is_marked
from .padding import known_ids

ROW = np.dtype(
    [("top_k", np.int32), ("top_p", np.float32), ("other_top_k", np.bool_), ("other_top_p", np.bool_)]
)
"""`top_k`: the most ids that a set may have, 0 = wants none. `other_...`: wants none, but vLLM's cut."""
NOBODY = np.array((0, 1.0, False, False), ROW)


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
        self.limit = known_ids(vllm_config)
        self.device, self.pin = device, is_pin_memory
        self.table = np.zeros(vllm_config.scheduler_config.max_num_seqs, ROW)
        """Per row of the batch what is known of it."""
        self.columns: Tensor | None = None
        """The sets of the step, as `cut_rows` returns them; whoever reads them takes them away."""
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
        if highest >= len(self.table):
            more = np.zeros(highest + 1 - len(self.table), ROW)
            self.table = np.concatenate((self.table, more))
        table = self.table
        for row in batch_update.removed:
            table[row] = NOBODY
        for row, params, _, _ in batch_update.added:
            table[row] = self._entry(params)
        for a, b, direction in batch_update.moved:
            if direction == MoveDirectionality.SWAP:
                table[[a, b]] = table[[b, a]]
            else:
                table[b], table[a] = table[a], NOBODY
        self._place()

    def apply(self, logits: Tensor) -> Tensor:
        """float32 [R, V], already divided by the temperature; changed in place, in marked rows only."""
        if self.count and self.armed:
            rows = len(logits)
            self.columns = cut_rows(logits, self.top_k[:rows], self.top_p[:rows], self.limit, self.widest)
        return logits

    def mask_unknown(self, logits: Tensor) -> None:
        """Keep marked rows from ids that the tokenizer does not have, in place: before min_p, which compares
        every id with the most likely one, and comes before `apply`.
        """
        if self.limit < self.vocabulary:
            ours = self.top_k[: len(logits)] > 0
            logits[:, self.limit :].masked_fill_(ours[:, None], -torch.inf)

    def without_cuts(self, metadata: SamplingMetadata) -> SamplingMetadata:
        """What vLLM shall do after `apply`: its top-k and top-p for the other rows, none for these."""
        top_k, top_p = metadata.top_k, metadata.top_p
        if top_k is not None:
            ours = self.top_k[: len(top_k)] > 0
            top_k = torch.where(ours, self.vocabulary, top_k) if self.others_top_k else None
        if top_p is not None:
            ours = self.top_k[: len(top_p)] > 0
            top_p = torch.where(ours, 1.0, top_p) if self.others_top_p else None
        return dataclasses.replace(metadata, top_k=top_k, top_p=top_p)

    def _entry(self, params: SamplingParams) -> tuple[int, float, bool, bool]:
        if not is_marked(params):
            return (0, 1.0, 0 < params.top_k < self.vocabulary, params.top_p < 1)
        width = widest_set(params, self.vocabulary)
        assert width <= WIDTH, f"a request whose set may have {width} ids came through"
        return (width, params.top_p, False, False)

    def _place(self) -> None:
        """Put the rows on the device; only when the batch changed."""
        table = self.table
        self.count = int(np.count_nonzero(table["top_k"]))
        self.widest = int(table["top_k"].max(initial=0))
        self.others_top_k = bool(table["other_top_k"].any())
        self.others_top_p = bool(table["other_top_p"].any())
        self.top_k = self._to_device(table["top_k"])
        self.top_p = self._to_device(table["top_p"])

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values.copy())
        return (tensor.pin_memory() if self.pin else tensor).to(self.device, non_blocking=True)
