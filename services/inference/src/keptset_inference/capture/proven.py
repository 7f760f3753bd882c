"""The proof in the process that samples: what was recorded is what the tensor sampled from holds."""

from dataclasses import dataclass

from torch import Tensor


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
        for row, entry in zip(logprobs, columns.tolist(), strict=True):
            size = entry[0]
            if size < 0:  # wants none
                continue
            there = (row > -float("inf")).nonzero().flatten().tolist()
            if there == entry[1 : 1 + size] and len(there) == size:
                self.right += 1
            else:
                self.wrong += 1


__all__ = ["Proof"]
