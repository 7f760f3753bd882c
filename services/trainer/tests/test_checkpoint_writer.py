"""Shards of a checkpoint: what torch's own writer would write, without its copies."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from keptset_trainer.checkpoint_writer import ShardWriter


def state() -> dict[str, Tensor]:
    """Of several types and shapes, two of them parts of one storage, one without an element."""
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    return {
        "weights/a": whole[:1],
        "weights/b": whole[1:3],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0, 5),
        "steps": torch.tensor([1.0, 2.0]),
    }


def contents(folder: Path) -> dict[str, tuple[list[int], Tensor]]:
    """Of all files of a folder: name -> where in the whole the tensor begins, the tensor."""
    found: dict[str, tuple[list[int], Tensor]] = {}
    for path in folder.iterdir():
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            places = json.loads(metadata.pop("DCP_SHARDING_INFO"))
            assert metadata == {"DCP_VERSION": "1.0", "format": "pt"}
            names = list(file.keys())
            assert not found.keys() & set(names)
            found |= {name: (places[name]["saved_offsets"], file.get_tensor(name)) for name in names}
    return found


def test_files_hold_what_torchs_own_writer_writes(tmp_path: Path):
    dcp.save(state(), storage_writer=ShardWriter(tmp_path / "ours"), no_dist=True)
    theirs = HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True)
    dcp.save(state(), storage_writer=theirs, no_dist=True)
    ours, reference = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert ours.keys() == reference.keys() == state().keys()
    for name, (place, values) in reference.items():
        assert ours[name][0] == place
        assert ours[name][1].dtype == values.dtype
        assert torch.equal(ours[name][1], values)


def test_no_file_has_much_more_than_its_share(tmp_path: Path):
    many = {str(n): torch.zeros(n, 100) for n in range(40)}
    dcp.save(many, storage_writer=ShardWriter(tmp_path), no_dist=True)
    sizes = [sum(values.numel() for _, values in contents(path).values()) for path in files_apart(tmp_path)]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * sum(sizes) / 4


def files_apart(folder: Path) -> list[Path]:
    """Each file in a folder of its own."""
    folders = []
    for path in sorted(folder.glob("*.safetensors")):
        own = folder / path.stem
        own.mkdir()
        folders.append(path.rename(own / path.name).parent)
    return folders


def test_what_was_written_is_read(tmp_path: Path):
    written = {**state(), "turned": torch.arange(6.0).view(2, 3).T}
    dcp.save(written, storage_writer=ShardWriter(tmp_path), no_dist=True)
    read = {name: torch.full_like(values, 7.0) for name, values in written.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, values in written.items():
        assert torch.equal(read[name], values)
