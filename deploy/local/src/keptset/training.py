"""One training from start to end: the processes, what is shown meanwhile, and what they leave."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from keptset import external_ranks, gpus
from keptset.directory import RunDirectory
from keptset.display import Display
from keptset.grace import seconds_to_end
from keptset.health import wait_healthy
from keptset.metrics import MetricsTail, Row
from keptset.resolve import Prepared
from keptset.restarts import Restarts, count
from keptset.supervisor import Supervisor
from keptset_settings import (
    RunSettings,
    WarmStartSettings,
    reachable,
    service_environment,
    write_service_configs,
)

POLL = 0.1

RECIPE = ("min_letters", "max_letters", "seed")
"""Settings that make one warm start differ from another."""


@dataclass(frozen=True)
class Outcome:
    """What a finished training has to say."""

    rows: list[Row]
    startup: dict[str, float]
    """Seconds until healthy, by service."""
    seconds: float
    """All of it, from the first process to the last one's end."""
    restarts: dict[str, int]
    """How often each service was started again, also before a `keptset resume`."""


def train(prepared: Prepared, display: Display) -> Outcome:
    """Runs warm start (if the model is missing), inference, trainer and orchestrator; ends them all, always.

    In the directory of a run that was stopped or killed it goes on with that run.

    Raises ProcessDied, TimeoutError (who was waited for, how long) or Stopped (a signal).
    """
    began = time.monotonic()
    run, directory, shares = prepared.run, prepared.directory, prepared.gpus
    if shares:
        display.line("gpus", gpus.said(shares))
    write_service_configs(run, directory.configs)
    restarts = Restarts(run.restarts, directory.restarts, display)
    tail = MetricsTail(directory.metrics)
    if earlier := tail.new_rows():
        display.line("steps", f"{len(earlier)} of {run.orchestrator.steps} are done already")
    with Supervisor(held=(directory.lock,)) as supervisor:
        if run.warm_start is not None:
            patience = run.orchestrator.startup_timeout
            _warm_start(run.warm_start, supervisor, directory, display, patience)
        urls = {
            "inference": reachable(run.inference.host, run.inference.port),
            "trainer": reachable(run.trainer.host, run.trainer.port),
        }
        for name in ("inference", "trainer", "orchestrator"):
            # The orchestrator waits for the others itself; what is wrong with it shows at once like this.
            _start(name, supervisor, directory, run, shares.get(name), may_end=name == "orchestrator")
        if run.trainer.ranks == "external":
            display.line(
                "ranks",
                f"waiting for them; in another shell: {external_ranks.command(run, shares.get('trainer'))}",
            )
        with display.waiting() as waiting:
            startup = wait_healthy(
                urls,
                run.orchestrator.start_patience,
                lambda: restarts.check(supervisor),
                lambda missing, s: waiting.update("waiting for " + _said(missing), s),
                lambda name, s: display.line(name, f"healthy after {s:.1f} s, {urls[name]}"),
            )
        rows = _follow(run, tail, supervisor, restarts, display)
    if run.trainer.ranks == "external":
        display.line("ranks", "they wait for more: end torchrun with Ctrl-C")
    return Outcome(rows, startup, time.monotonic() - began, count(directory.restarts))


def _start(
    name: str,
    supervisor: Supervisor,
    directory: RunDirectory,
    run: RunSettings,
    seen: list[str] | None,
    may_end: bool = False,
) -> None:
    """`seen`: GPUs; None: those that this process sees."""
    config = directory.configs / ("inference-0.toml" if name == "inference" else f"{name}.toml")
    command = [sys.executable, "-m", f"keptset_{name}", "--config", str(config)]
    environment = service_variables(service_environment(run, name))
    if seen is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
    log, grace = directory.logs / f"{name}.log", seconds_to_end(name, run)
    supervisor.start(name, command, log, environment, may_end, grace)


def service_variables(secrets: dict[str, str]) -> dict[str, str]:
    """The environment of a service's process."""
    # Our own variables are in the resolved files already, where the command line has overruled some of them.
    ours = {name: text for name, text in os.environ.items() if not name.startswith("KEPTSET_")}
    # Engine and trainer share the cores with each other and with the rest, and threads spin at barriers while
    # one of them does not run: on two cores the demo's rollouts took 72 s with two threads, 22 s with one.
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    return {"OMP_NUM_THREADS": str(threads)} | ours | secrets


def _warm_start(
    settings: WarmStartSettings,
    supervisor: Supervisor,
    directory: RunDirectory,
    display: Display,
    patience: float,
) -> None:
    model = settings.directory
    assert model is not None, "resolving a run fills it in"
    if _is_made(model, settings):
        display.line("model", f"{model} (cached)")
        return
    command = [sys.executable, "-m", "keptset_trainer", "warm-start", "--directory", str(model)]
    for option in RECIPE:
        command += [f"--{option.replace('_', '-')}", str(getattr(settings, option))]
    log = directory.logs / "warm-start.log"
    process = supervisor.start("warm start", command, log, service_variables({}), may_end=True)
    with display.waiting() as waiting:
        while process.popen.poll() is None:
            if time.monotonic() - process.started > patience:
                raise TimeoutError(
                    f"waited {patience:.0f} s for the warm start of {model}; its log is {log}. "
                    "A slower machine needs a larger orchestrator.startup_timeout"
                )
            time.sleep(POLL)
            last = log.read_text(errors="replace").rpartition("\n")[0].rpartition("\n")[2]
            what = f"making the model {model}" + (f" ({last})" if last else "")
            waiting.update(what, time.monotonic() - process.started)
    supervisor.check()
    supervisor.end(process)
    display.line("model", f"{model} made in {time.monotonic() - process.started:.1f} s")


def _is_made(model: Path, settings: WarmStartSettings) -> bool:
    """Whether the model is there; of one that was made otherwise, the command that makes it will complain."""
    try:
        recipe = json.loads((model / "recipe.json").read_text())["recipe"]
        return all(recipe[name] == getattr(settings, name) for name in RECIPE)
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return False


def _follow(
    run: RunSettings, tail: MetricsTail, supervisor: Supervisor, restarts: Restarts, display: Display
) -> list[Row]:
    """Shows rows until the orchestrator ends properly; returns them all."""
    limits, silence = run.orchestrator, longest_silence(run)
    latest = time.monotonic()
    with display.training(limits.steps) as training:
        while True:
            orchestrator = supervisor.processes[-1]
            # asked first: rows written before its end are read below
            ended = orchestrator.popen.poll() is not None
            for row in tail.new_rows():
                training.row(row)
                restarts.finished_a_step()
                latest = time.monotonic()
            restarts.check(supervisor)
            if ended and orchestrator is supervisor.processes[-1]:
                break
            if time.monotonic() - latest > silence:
                raise TimeoutError(f"waited {silence:.0f} s for a row of the orchestrator in {tail.path}")
            time.sleep(POLL)
    rows = MetricsTail(tail.path).new_rows()
    if len(rows) != limits.steps:
        raise RuntimeError(
            f"the orchestrator ended after {len(rows)} of {limits.steps} steps; see {orchestrator.log}"
        )
    return rows


def longest_silence(run: RunSettings) -> float:
    """Seconds after which an orchestrator without a new row hangs itself: every wait in it has its own limit.

    The trainer may have been started again, and train what came after its last checkpoint once more.
    """
    limits = run.orchestrator
    return 2 * (
        limits.start_patience
        + limits.request_attempts * limits.request_timeout
        + (1 + run.trainer.checkpoint_interval) * limits.step_timeout
        + limits.weights_timeout
    )


def _said(missing: dict[str, str]) -> str:
    return ", ".join(f"{name} ({said})" for name, said in missing.items())
