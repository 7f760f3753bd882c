"""The shards of a rank as safetensors files, written side by side from where the tensors lie.

torch's own writer serialises a rank's whole state to bytes first, and then writes those: four times the CPU
time, and memory for two copies of the state, at every step.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    _gen_file_name,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILES = 4
"""Of a rank, each written by a thread of its own."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes what HuggingFaceStorageWriter(save_distributed=True) writes, to the byte of every tensor.

    Args:
        path: of the directory; created if it is not there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """The files of this rank."""
        parts = evenly(plan.items, FILES)
        shard = plan.storage_data["shard_index"]
        paths = [Path(self.path) / _gen_file_name(i, len(parts), shard) for i in range(1, len(parts) + 1)]
        with ThreadPoolExecutor(FILES) as pool:
            list(pool.map(lambda path, part: write(path, part, planner), paths, parts))
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # of use to writers that leave an index beside the files
        return done


def evenly(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Up to `count` parts of about as many elements; none is empty."""
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=elements, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(item)
        sizes[smallest] += elements(item) + 1
    return [part for part in parts if part]


def elements(item: WriteItem) -> int:
    """Of this rank's shard of a tensor."""
    assert item.type != WriteItemType.BYTE_IO, f"{item.index.fqn} is no tensor"
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel()


def write(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> None:
    """A file of tensors, and where in the whole each begins."""
    tensors, places = {}, {}
    for item in items:
        assert item.tensor_data is not None
        tensors[item.index.fqn] = planner.resolve_data(item).detach().cpu().contiguous()
        places[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
    metadata = {
        CUSTOM_METADATA_KEY: json.dumps(places),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
    }
    save_file(tensors, path, metadata)
