"""Which GPUs of this machine a run's engine and trainer see."""

import os
import subprocess
from collections.abc import Sequence
from itertools import takewhile

from keptset_settings import RunSettings

LIST = ("nvidia-smi", "--list-gpus")
SECONDS = 60.0
WORKERS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Of `inference.vllm`: an engine has their product of workers, on a GPU each."""
BOTH_ON_ONE = "NCCL_MULTI_RANK_GPU_ENABLE"


def visible() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, or as many as nvidia-smi lists. Empty if nobody says: there are
    none, or instances of them (MIG), of which a process sees one whatever it is told.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES names one twice: to CUDA there is none then.
    """
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = list(takewhile(lambda name: name != "-1", (one.strip() for one in named.split(","))))
        names = [name for name in names if name]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"CUDA_VISIBLE_DEVICES={named}: {twice[0]} is named twice; name each GPU once")
        return names
    try:
        done = subprocess.run(LIST, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    if any(line.strip().startswith("MIG") for line in lines):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU") for line in lines))]


def shared_out(run: RunSettings, there: Sequence[str]) -> dict[str, list[str]]:
    """Those of `there` that inference and trainer see each. Whoever is not named sees what this process sees.

    An engine gets as many as it has workers and the trainer the rest, if there is a rest; else, and in a
    colocated run, both see all. What `gpus` says goes before.

    Raises:
        ValueError: `gpus` names one that is not there; or weights go by NCCL, which before 2.30
            takes no two processes on one GPU, and nothing else is possible with so few.
    """
    everyone = range(len(there))
    given = {name: getattr(run.gpus, name) for name in ("inference", "trainer")}
    for name, numbers in given.items():
        if absent := sorted(set(numbers or ()) - set(everyone)):
            seen = f"{len(there)} to be seen here ({', '.join(there)})" if there else "none to be seen here"
            raise ValueError(f"gpus.{name}: {absent[0]}: there is no such GPU, of {seen}; they count from 0")
    if not there:
        return {}
    if run.trainer.device == "cpu":
        numbers = given["inference"]
        return {} if numbers is None else {"inference": [there[number] for number in numbers]}
    inference, trainer = given["inference"], given["trainer"]
    if inference is None:
        workers = _workers(run)
        free = [number for number in everyone if number not in (trainer or ())]
        has_rest = len(free) >= workers + (trainer is None) and not run.colocated
        inference = free[:workers] if has_rest else list(everyone)
    if trainer is None:
        rest = [number for number in everyone if number not in inference]
        trainer = rest if rest and not run.colocated else list(everyone)
    if run.weights.transfer == "nccl" and os.environ.get(BOTH_ON_ONE) != "1":
        _refuse_both_on_one(there, sorted(set(inference) & set(trainer)))
    if given == {"inference": None, "trainer": None} and inference == trainer == list(everyone):
        return {}
    return {
        "inference": [there[number] for number in inference],
        "trainer": [there[number] for number in trainer],
    }


def said(shares: dict[str, list[str]]) -> str:
    """For whoever watches."""
    return ", ".join(f"{', '.join(names)} for {name}" for name, names in shares.items())


def _workers(run: RunSettings) -> int:
    workers = 1
    for name in WORKERS:
        size = run.inference.vllm.get(name, 1)
        workers *= size if type(size) is int else 1
    return workers


def _refuse_both_on_one(there: Sequence[str], both: list[int]) -> None:
    if both:
        names = ", ".join(there[number] for number in both)
        raise ValueError(
            f'weights.transfer = "nccl": inference and trainer are both on GPU {names} of {len(there)}, and '
            'NCCL takes no two processes on one GPU; set weights.transfer = "files", or gpus.inference and '
            f"gpus.trainer to others (NCCL from 2.30 on takes them with {BOTH_ON_ONE}=1)"
        )
