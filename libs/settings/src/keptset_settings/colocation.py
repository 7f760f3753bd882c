"""The rules of `colocated`: an engine and a trainer that take turns on one GPU."""

from .errors import Problem
from .inference import InferenceSettings
from .orchestrator import OrchestratorSettings
from .run import RunSettings
from .trainer import TrainerSettings

LOCK = "gpu.lock"
"""Of a run's directory."""

NO_NCCL = (
    "does not go with colocated: NCCL takes no two processes on one GPU, and engine and trainer are never "
    'there at the same time; set "files"'
)


def share_gpu(run: RunSettings) -> list[Problem]:
    """Give the three services of a colocated run what they need of it; what is wrong if they differ."""
    inference, trainer = run.inference, run.trainer
    if not run.colocated:
        why = "needs the others to take turns too: set colocated = true for the run, or leave it out"
        given = {
            ("inference", "gpu_lock"): inference.gpu_lock and inference.gpu_lock.as_posix(),
            ("trainer", "gpu_lock"): trainer.gpu_lock and trainer.gpu_lock.as_posix(),
            ("orchestrator", "colocated"): run.orchestrator.colocated,
        }
        return [Problem(path, why, value) for path, value in given.items() if value]
    run.orchestrator.colocated = True
    lock = inference.gpu_lock or trainer.gpu_lock or run.runs_dir / run.name / LOCK
    inference.gpu_lock, trainer.gpu_lock = inference.gpu_lock or lock, trainer.gpu_lock or lock
    problems = []
    if run.weights.transfer == "nccl":
        problems.append(Problem(("weights", "transfer"), NO_NCCL, "nccl"))
    if trainer.gpu_lock != inference.gpu_lock:
        why = f"is not inference's, {inference.gpu_lock}, so nobody would wait; leave one of them out"
        problems.append(Problem(("trainer", "gpu_lock"), why, trainer.gpu_lock.as_posix()))
    return problems


def check_inference(settings: InferenceSettings) -> list[Problem]:
    """What an engine that sleeps cannot do."""
    if settings.gpu_lock is None or settings.vllm.get("enable_sleep_mode") is not False:
        return []
    why = "leaves the memory where it is, and the trainer on the same GPU needs it; leave it out"
    return [Problem(("inference", "vllm", "enable_sleep_mode"), why, False)]


def check_trainer(settings: TrainerSettings) -> list[Problem]:
    """What a trainer whose states leave the GPU cannot do."""
    if settings.gpu_lock is None or settings.cuda_graphs != "on":
        return []
    why = (
        "does not go with colocated: what was recorded reads the weights where they lay, and they come back "
        'to another place; set "auto" or "off"'
    )
    return [Problem(("trainer", "cuda_graphs"), why, "on")]


def check_orchestrator(settings: OrchestratorSettings) -> list[Problem]:
    """What an orchestrator whose servers sleep cannot do."""
    if not settings.colocated or settings.max_async_level == 0:
        return []
    why = (
        "asks for rollouts while the trainer steps, but with colocated the engine sleeps then; set 0, or "
        "give engine and trainer a GPU each and leave colocated out"
    )
    return [Problem(("orchestrator", "max_async_level"), why, settings.max_async_level)]


def check_alone(
    table: str, settings: InferenceSettings | TrainerSettings | OrchestratorSettings
) -> list[Problem]:
    """What `share_gpu` says of a whole run: nothing goes from GPU to GPU where there is one."""
    shares = settings.colocated if isinstance(settings, OrchestratorSettings) else settings.gpu_lock
    if not shares or settings.weights_transfer != "nccl":
        return []
    return [Problem((table, "weights_transfer"), NO_NCCL, "nccl")]
