"""Engine and trainer of `keptset run` have GPUs of their own where there are enough, and NCCL has two."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset import external_ranks, gpus
from keptset_settings import RunSettings, resolve_run

from .test_command import DEMO

ROOT = Path(__file__).parents[3]


def run_of(
    *, colocated: bool = False, device: str = "auto", transfer: str = "files", **more: object
) -> RunSettings:
    engine = {name: more.pop(name) for name in list(more) if name.endswith("_size")}
    tables = {"inference": {"model": "m", "vllm": engine}, "trainer": {"device": device}}
    return RunSettings.model_validate(
        {"colocated": colocated, "weights": {"transfer": transfer}, "gpus": more, **tables}
    )


@pytest.mark.parametrize(
    ("run", "there", "shares"),
    [
        (run_of(), "", {}),
        (run_of(), "0", {}),
        (run_of(), "0 1", {"inference": "0", "trainer": "1"}),
        (run_of(), "4 6 7", {"inference": "4", "trainer": "6 7"}),
        (run_of(tensor_parallel_size=2), "0 1", {}),
        (run_of(tensor_parallel_size=2), "0 1 2", {"inference": "0 1", "trainer": "2"}),
        (
            run_of(tensor_parallel_size=2, data_parallel_size=2),
            "0 1 2 3 4 5",
            {"inference": "0 1 2 3", "trainer": "4 5"},
        ),
        (run_of(colocated=True), "0 1", {}),
        (run_of(device="cpu"), "0 1", {}),
        (run_of(device="cpu", inference=[1]), "0 1", {"inference": "1"}),
        (run_of(trainer=[0]), "0 1 2", {"inference": "1", "trainer": "0"}),
        (run_of(inference=[1]), "0 1 2", {"inference": "1", "trainer": "0 2"}),
        (run_of(inference=[0], trainer=[0]), "0 1", {"inference": "0", "trainer": "0"}),
        (run_of(trainer=[0, 1]), "0 1", {"inference": "0 1", "trainer": "0 1"}),
        (run_of(inference=[1], colocated=True), "0 1", {"inference": "1", "trainer": "0 1"}),
    ],
)
def test_an_engine_has_as_many_as_workers_and_the_trainer_the_rest(run, there, shares):
    assert gpus.shared_out(run, there.split()) == {name: seen.split() for name, seen in shares.items()}


@given(workers=st.integers(1, 4), there=st.integers(0, 9))
def test_nobody_is_left_without_one_and_none_is_shared_where_there_are_enough(workers, there):
    names = [f"GPU-{number}" for number in range(there)]
    shares = gpus.shared_out(run_of(tensor_parallel_size=workers), names)
    if there <= workers:
        assert shares == {}, "all see all, as without a word of it"
    else:
        assert len(shares["inference"]) == workers
        assert sorted(shares["inference"] + shares["trainer"]) == names


@pytest.mark.parametrize(("there", "seen"), [("", "none to be seen"), ("0 1", r"2 to be seen here \(0, 1\)")])
def test_one_that_is_not_there_is_named(there, seen):
    with pytest.raises(ValueError, match=rf"gpus\.trainer: 2: there is no such GPU, of {seen}"):
        gpus.shared_out(run_of(trainer=[1, 2] if there else [2]), there.split())


@pytest.mark.parametrize(
    "run", [run_of(transfer="nccl"), run_of(transfer="nccl", inference=[0], trainer=[0])]
)
def test_nccl_wants_two(run, monkeypatch):
    monkeypatch.delenv(gpus.BOTH_ON_ONE, raising=False)
    with pytest.raises(ValueError, match=r'both on GPU 0 of 1, .* set weights.transfer = "files", or gpus'):
        gpus.shared_out(run, ["0"])
    monkeypatch.setenv(gpus.BOTH_ON_ONE, "1")
    gpus.shared_out(run, ["0"])
    monkeypatch.delenv(gpus.BOTH_ON_ONE)
    assert gpus.shared_out(run_of(transfer="nccl"), ["0", "1"]) == {"inference": ["0"], "trainer": ["1"]}


@pytest.mark.parametrize(
    ("numbers", "why"), [([0, 0], "names one twice"), ([], "at least 1"), ([-1], "greater")]
)
def test_what_names_no_gpus_is_refused(numbers, why):
    with pytest.raises(ValueError, match=why):
        run_of(trainer=numbers)


@pytest.mark.parametrize(
    ("named", "seen"),
    [("", ""), ("-1", ""), ("0,-1,1", "0"), ("4, 7", "4 7"), ("GPU-a,GPU-b", "GPU-a GPU-b")],
)
def test_what_this_process_sees_is_what_there_is(named, seen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpus.visible() == seen.split()


@pytest.mark.parametrize("named", ["0,0", "1,0, 1", "GPU-a,GPU-a"])
def test_one_that_is_named_twice_is_refused(named, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={named}: .* is named twice"):
        gpus.visible()


TWO = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n"
INSTANCE = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-3)\n"


@pytest.mark.parametrize(
    ("listed", "code", "seen"), [(TWO, 0, "0 1"), (INSTANCE, 0, ""), (TWO, 9, ""), ("", 0, "")]
)
def test_otherwise_nvidia_smi_lists_them(listed, code, seen, tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\nexit {code}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.visible() == seen.split()


def test_each_service_sees_its_own(keptset, work):
    code, out, err = keptset(
        "run", DEMO, "--orchestrator.steps", 1, "--trainer.device", "auto", CUDA_VISIBLE_DEVICES="4,7"
    )
    assert code == 0, err
    assert re.search(r"gpus +4 for inference, 7 for trainer", out)
    logs = next(work.glob("runs/reverse-text*/logs"))
    saw = {name: (logs / f"{name}.log").read_text() for name in ("inference", "trainer", "orchestrator")}
    assert "GPUs: 4\n" in saw["inference"]
    assert "GPUs: 7\n" in saw["trainer"]
    assert "GPUs: 4,7\n" in saw["orchestrator"]


def test_ranks_that_somebody_else_starts_are_told_theirs():
    run = resolve_run(RunSettings.model_validate({"inference": {"model": "m"}}))
    assert "&& CUDA_VISIBLE_DEVICES=1,2 TORCH_ELASTIC" in external_ranks.command(run, ["1", "2"])
    assert "CUDA_VISIBLE_DEVICES" not in external_ranks.command(run)
