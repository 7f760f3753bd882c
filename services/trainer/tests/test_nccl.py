"""What NCCL is called with, against a library of the same C interface; NCCL itself: test_cuda.py."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from keptset_settings import TrainerSettings
from keptset_trainer import nccl_wire, train
from keptset_trainer.nccl import Communicator, Library, NcclError
from keptset_trainer.ranks import Ranks

ID = bytes(i * 3 % 256 for i in range(128))
STREAM = 2**40 + 7


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).with_name("played_nccl.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, source], check=True)
    return path


def seen(path: Path) -> list[int]:
    return list((ctypes.c_longlong * 6).in_dll(ctypes.CDLL(str(path)), "seen"))


def test_all_that_a_group_needs_arrives_as_it_was_meant(played):
    library = Library(str(played))
    assert library.version() == "2.28.9"
    assert library.unique_id() == ID, "zeros inside it do not end it"
    one = Communicator(ID, 1, 0, library)
    assert ctypes.CDLL(str(played)).joined_by(ID, 1, 0), "the id is passed by value"
    one.all_reduce(torch.zeros(3), STREAM)
    assert seen(played)[:4] == [3, 7, 0, STREAM]
    one.broadcast(torch.zeros(5, dtype=torch.uint8), 0, STREAM)
    assert seen(played)[:4] == [5, 1, 0, STREAM], "a count of elements, and a pointer of 64 bits"
    one.abort()
    assert seen(played)[4:] == [1, 1]


def test_what_nccl_refuses_is_said_in_its_words(played):
    with pytest.raises(
        NcclError, match=r"ncclCommInitRank: invalid usage \(Multiple Ranks are using the same"
    ):
        Communicator(ID, 2, 0, Library(str(played)))


def test_without_nccl_that_is_said(tmp_path):
    with pytest.raises(NcclError, match=r"which torch for CUDA brings, is not there: .*libnccl"):
        Library(str(tmp_path / "libnccl.so.2"))


def test_a_trainer_whose_nccl_does_not_work_refuses_at_the_start(monkeypatch):
    """Not at the first update, where every send would fail and be made up for by files."""

    def broken(device: torch.device) -> str:
        raise NcclError("ncclCommInitRank: unhandled cuda error")

    monkeypatch.setattr(nccl_wire, "prove", broken)
    settings = TrainerSettings.model_construct(weights_transfer="nccl", bucket_bytes=1)
    with pytest.raises(ValueError, match=r'not possible here: ncclComm.* set weights.transfer = "files"'):
        train.weight_sender(settings, None, None, None, Ranks(torch.device("cuda")))
