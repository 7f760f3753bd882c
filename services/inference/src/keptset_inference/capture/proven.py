"""The proof in the process that samples: what was recorded is what the tensor sampled from holds."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors


@dataclass
class Proof:
    """Rows that were compared while the server started."""

    right: int = 0
    wrong: int = 0

    def compare(self, logprobs: Tensor | None, columns: Tensor | None) -> None:
        """Hold the recorded sets of a step against the finite entries of its processed logprobs.

        Args:
            logprobs: [R, V], of what the tokens were sampled from (logits do as well).
            columns: int32 [R, 1 + width], as `cut.cut_rows` returns them.
        """
        if logprobs is None or columns is None:
            self.wrong += 1
            return
        with gpu_sync_allowed():  # nothing else of ours waits for the device
            for row, entry in zip(logprobs, columns.tolist(), strict=True):
                size = entry[0]
                if size < 0:  # wants none
                    continue
                there = (row > -float("inf")).nonzero().flatten().tolist()
                self._count(there == entry[1 : 1 + size] and len(there) == size)

    def compare_masks(
        self, logits: Tensor, cu_num_logits: Tensor, num_sampled: Tensor, masks: "SamplingMaskTensors"
    ) -> None:
        """The same for vLLM's masks: a request has `rows_per_request` slots, of which it sampled some."""
        with gpu_sync_allowed():
            counts, ids = masks.counts.tolist(), masks.token_ids.tolist()
            for request, (first, sampled) in enumerate(
                zip(cu_num_logits[:-1].tolist(), num_sampled.tolist(), strict=True)
            ):
                for place in range(sampled):
                    there = (logits[first + place] > -float("inf")).nonzero().flatten().tolist()
                    slot = request * masks.rows_per_request + place
                    known = ids[slot][: len(there)]
                    self._count(counts[slot] == len(there) and known == there[: len(ids[slot])])

    def _count(self, right: bool) -> None:
        if right:
            self.right += 1
        else:
            self.wrong += 1


__all__ = ["Proof"]
