"""Rows that begin beyond 2^31 elements, where a place of 32 bits wraps: on the GPU, or in the interpreter.

131,072 positions of 16,384 numbers reach that, and so do 262,144 ids of 8,192. Without a GPU the memory is a
file with a hole, of which only what is touched exists.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .triton_here import import_kernels

if reason := import_kernels():
    pytest.skip(reason, allow_module_level=True)

rows_of: Any = import_module("kept_loss.kernels.rows")
segments: Any = import_module("kept_loss.kernels.segments")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

WIDTH = 1024
FAR = 2**31 // WIDTH + 1
"""The first row of which every element lies beyond."""
Large = Callable[[], Tensor]


@pytest.fixture
def large(tmp_path: Path) -> Large:
    """Makes zeros, bfloat16 [FAR + 2, WIDTH]: 4 GiB."""
    made: list[Path] = []

    def zeros() -> Tensor:
        size = (FAR + 2) * WIDTH
        if torch.cuda.is_available():
            return torch.zeros(size, dtype=torch.bfloat16, device="cuda").view(-1, WIDTH)
        made.append(tmp_path / f"hole-{len(made)}")
        file = torch.from_file(str(made[-1]), shared=True, size=size, dtype=torch.bfloat16)
        return file.view(-1, WIDTH)

    return zeros


def some(seed: int) -> Tensor:
    """Two rows that bfloat16 holds."""
    return torch.randint(-8, 9, (2, WIDTH), generator=torch.Generator().manual_seed(seed)).bfloat16() / 8


def test_logits_of_far_rows(large: Large) -> None:
    weight, hidden = large(), large()
    weight[FAR:], hidden[FAR:] = some(0).to(weight.device), some(1).to(weight.device)
    ids = torch.tensor([FAR, FAR + 1, FAR], dtype=torch.int32, device=weight.device)
    positions = torch.tensor([FAR, FAR, FAR + 1], dtype=torch.int32, device=weight.device)
    got = rows_of.entry_logits(hidden, weight, ids, positions, None, None)
    w, h = some(0).double()[[0, 1, 0]], some(1).double()[[0, 0, 1]]
    torch.testing.assert_close(got.cpu().double(), (w * h).sum(1), rtol=1e-5, atol=1e-4)


def test_sums_of_far_rows_into_far_rows(large: Large) -> None:
    source, out = large(), large()
    source[FAR:] = some(2).to(source.device)
    counts = [70, 3]  # the first crosses a border of blocks, and is joined
    entries = torch.arange(sum(counts)) % 2
    coefs = (entries + 1.0) / 64
    target = torch.repeat_interleave(torch.tensor([FAR, FAR + 1]), torch.tensor(counts))
    arguments = [one.to(source.device) for one in (FAR + entries, coefs, target.int())]
    segments.segment_sum(source, *arguments, out)
    want = torch.zeros(2, WIDTH, dtype=torch.float64)
    want.index_add_(0, target - FAR, coefs[:, None].double() * some(2).double()[entries])
    torch.testing.assert_close(out[FAR:].cpu().double(), want, rtol=1e-2, atol=1e-2)
    assert not out[:4].any()
