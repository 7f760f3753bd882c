"""Logprobs of sampled tokens as arrays, from the engine to the answer.

vLLM's own container makes Python objects of every token in every step (5 us a token, in the process that also
serves HTTP). Ours keeps the rows as they come; only requests of our route use it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import vllm.v1.engine.logprobs as vllm_logprobs
from vllm.logprobs import SampleLogprobs
from vllm.v1.outputs import LogprobsLists

NO_ID = -1
"""Where one step answered fewer candidates than another: no token."""


class TokenLogprobs(NamedTuple):
    """T tokens; column 0 is the sampled token, then C candidates, best first."""

    token_ids: np.ndarray
    """int32 [T, 1 + C]; NO_ID where there is no candidate."""
    logprobs: np.ndarray
    """float32 [T, 1 + C]."""
    ranks: np.ndarray
    """int32 [T], of the sampled tokens; 0 = not known. Candidate c has rank c."""


class LogprobRows:
    """What vLLM's output processor fills for one sequence, in place of its `FlatLogprobs`.

    Has the three methods that vLLM calls: the length, the last rows of a delta, and what a slow reader's
    deltas are merged with.
    """

    __slots__ = ("_length", "_rows")

    def __init__(self, rows: Iterable[LogprobsLists] = ()) -> None:
        """Nothing yet, or these."""
        self._rows = list(rows)
        self._length = sum(len(row.logprobs) for row in self._rows)

    def append(self, rows: LogprobsLists, candidates: int) -> None:
        """The rows of a step; columns that only other requests of the batch asked for are left out."""
        if candidates >= 0 and rows.logprobs.shape[1] > 1 + candidates:
            width = 1 + candidates
            rows = rows._replace(
                logprob_token_ids=rows.logprob_token_ids[:, :width], logprobs=rows.logprobs[:, :width]
            )
        self._rows.append(rows)
        self._length += len(rows.logprobs)

    def extend(self, more: "LogprobRows") -> None:
        """Put another sequence's end behind."""
        self._rows.extend(more._rows)
        self._length += more._length

    def __len__(self) -> int:
        """How many tokens."""
        return self._length

    def __getitem__(self, part: slice) -> "LogprobRows":
        """`[-n:]` or `[:0]`, which is all that vLLM asks for."""
        left = range(self._length)[part]
        if not left:
            return LogprobRows()
        assert left.step == 1
        assert left.stop == self._length, "only the end of a sequence can be taken"
        wanted, rows = len(left), []
        for row in reversed(self._rows):
            if len(row.logprobs) > wanted:
                row = LogprobsLists(*(array[-wanted:] for array in row[:3]))
            rows.append(row)
            wanted -= len(row.logprobs)
            if not wanted:
                break
        return LogprobRows(reversed(rows))

    def arrays(self) -> TokenLogprobs:
        """All of it."""
        if not self._rows:
            return TokenLogprobs(
                np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32)
            )
        widths = {row.logprobs.shape[1] for row in self._rows}
        ids, values = [row.logprob_token_ids for row in self._rows], [row.logprobs for row in self._rows]
        if len(widths) > 1:
            width = max(widths)
            ids = [_widened(array, width, NO_ID) for array in ids]
            values = [_widened(array, width, -np.inf) for array in values]
        return TokenLogprobs(
            np.concatenate(ids).astype(np.int32, copy=False),
            np.concatenate(values).astype(np.float32, copy=False),
            np.concatenate([row.sampled_token_ranks for row in self._rows]).astype(np.int32, copy=False),
        )


def keep_logprob_rows() -> None:
    """Let vLLM's output processor fill `LogprobRows` where a request says `flat_logprobs`: in the process of
    the API, where only our route does.
    """
    create, update = vllm_logprobs.create_sample_logprobs, vllm_logprobs.LogprobsProcessor

    def create_sample_logprobs(flat_logprobs: bool) -> "SampleLogprobs | LogprobRows":
        return LogprobRows() if flat_logprobs else create(flat_logprobs)

    original = update._update_sample_logprobs

    def _update_sample_logprobs(self: vllm_logprobs.LogprobsProcessor, rows: LogprobsLists) -> None:
        if type(self.logprobs) is LogprobRows:
            self.logprobs.append(rows, self.num_logprobs)
        else:
            original(self, rows)

    if original.__module__ != __name__:
        vllm_logprobs.create_sample_logprobs = create_sample_logprobs
        update._update_sample_logprobs = _update_sample_logprobs


def _widened(array: np.ndarray, width: int, fill: float) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)


__all__ = ["NO_ID", "LogprobRows", "TokenLogprobs", "keep_logprob_rows"]
