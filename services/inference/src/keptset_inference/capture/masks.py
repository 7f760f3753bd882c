"""vLLM's mask tensors, brought to the host at the price of what is in them."""

import numpy as np
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

from .compact import compact


class KeptMasks(SamplingMaskTensors):
    """vLLM copies a bit for each id of the vocabulary and row to the host (5 MB a step of 256 rows), in case
    that a row is wider than its compact form. Ours stay on the device until there is such a row. And where
    vLLM goes over the rows one by one, all are taken at once.
    """

    __slots__ = ()

    def to_cpu_nonblocking(self) -> "KeptMasks":
        """All but the bits."""
        if self.token_ids.device.type == "cpu":
            return self
        return self._replace(
            token_ids=self.token_ids.to("cpu", non_blocking=True),
            counts=self.counts.to("cpu", non_blocking=True),
        )

    def tolists(self, num_sampled_tokens: np.ndarray | None = None) -> SamplingMaskLists:
        """As vLLM's."""
        counts, width = self.counts.numpy(), self.token_ids.shape[1]
        rows, cu_num_generated_tokens = slice(None), None
        if self.rows_per_request > 1:
            assert num_sampled_tokens is not None
            slots = np.arange(self.rows_per_request)
            rows = np.flatnonzero(slots[None, :] < num_sampled_tokens[:, None])
            cu_num_generated_tokens = np.cumsum([0, *num_sampled_tokens]).tolist()
        counts = counts[rows]
        if (counts > width).any():
            whole = SamplingMaskTensors(*self)._replace(packed_mask=self.packed_mask.cpu())
            return whole.tolists(num_sampled_tokens)
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return SamplingMaskLists(
            compact(self.token_ids.numpy()[rows], counts), offsets, cu_num_generated_tokens
        )


__all__ = ["KeptMasks"]
