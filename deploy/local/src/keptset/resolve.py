"""From arguments to a run that can start: its settings, its directory, its ports."""

import io
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from keptset import directory, gpus, origin, ports
from keptset.metrics import MetricsTail
from keptset_settings import (
    InferenceSettings,
    OrchestratorSettings,
    Problem,
    RunSettings,
    TrainerSettings,
    is_absent_directory,
    load_run,
    reachable,
)

SERVICES = ("inference", "trainer", "orchestrator")


@dataclass(frozen=True)
class Prepared:
    """Resolved settings and the directory that they point into, fresh or gone on with."""

    run: RunSettings
    directory: directory.RunDirectory
    gpus: dict[str, list[str]]
    """Those that inference and trainer see each; whoever is not named sees what this process sees."""


def prepare(argv: list[str], overwrite: bool) -> Prepared:
    """Resolves a run's arguments, chooses ports and makes its directory.

    Exits with code 2 and reasons if the settings are wrong, with code 0 after printing them if `--dry-run`
    is among the arguments. Raises ValueError if a model or a GPU is not there or a port is taken,
    FileExistsError if the directory is.
    """
    run = load_run(argv)
    if run.inference.model is None:
        raise ValueError(
            "inference.model is not set: name a model's directory, or add [warm_start] to have one made"
        )
    if absent := absent_models(run):
        raise ValueError("\n".join(map(str, absent)))
    shares = gpus.shared_out(run, gpus.visible())
    for note in uncalled(run):
        print(f"warning: {note}", file=sys.stderr)
    chosen = choose_ports(run)
    exact = any(argument.partition("=")[0] == "--name" for argument in argv)
    made = directory.create(run.runs_dir, run.name, exact=exact, overwrite=overwrite)
    overrides = ["--name", made.path.name]
    for setting, port in chosen.items():
        overrides += [f"--{setting}", str(port)]
    # A second time, because paths and URLs follow from name and ports. What there is to say has been said.
    with redirect_stderr(io.StringIO()):
        prepared = Prepared(load_run([*argv, *overrides]), made, shares)
    origin.remember(prepared.run, made, _free(run))
    return prepared


def absent_models(run: RunSettings) -> list[Problem]:
    """Models that are not where a run looks for them; one that it makes itself need not be there yet."""
    if run.warm_start is not None:
        return []
    engine, trainer, tokenizer = run.inference.model, run.trainer.model, run.orchestrator.tokenizer
    why = "is no directory here; name one, or the model's hub name"
    found = [
        Problem((name, "model"), why, model)
        for name, model in (("inference", engine), ("trainer", None if trainer == engine else trainer))
        if model is not None and is_absent_directory(model)
    ]
    if not found and tokenizer is not None and not (Path(tokenizer) / "tokenizer.json").is_file():
        path = ("inference", "model") if tokenizer == engine else ("orchestrator", "tokenizer")
        why = (
            "has no tokenizer.json here, and the orchestrator downloads none: name the directory of the "
            "model (or its tokenizer's as orchestrator.tokenizer)"
        )
        found.append(Problem(path, why, tokenizer))
    return found


def uncalled(run: RunSettings) -> list[Problem]:
    """Services that a run starts though the orchestrator calls others in their place; a proxy looks the
    same.
    """
    orchestrator, found = run.orchestrator, []
    for name, setting, urls, service in (
        ("inference", "inference_urls", orchestrator.inference_urls, run.inference),
        ("trainer", "trainer_url", [orchestrator.trainer_url], run.trainer),
    ):
        if any(url is not None and _listens_at(service.host, service.port, url) for url in urls):
            continue
        what = "the inference server" if name == "inference" else "the trainer"
        where = reachable(service.host, service.port) if service.port else "a free port"
        why = (
            f"names others than {what} that this run starts at {where}: if "
            f"nothing there passes requests on to it, nobody calls it; leave {setting} out, or write the "
            "configs with `keptset check CONFIG.toml --write DIRECTORY` and start the services yourself"
        )
        found.append(Problem(("orchestrator", setting), why, getattr(orchestrator, setting)))
    return found


def _listens_at(host: str, port: int, url: str) -> bool:
    """Might a service that listens there be what a URL calls? One that hears all has names unknown here."""
    called, own = urlsplit(url), urlsplit(reachable(host, port))
    default = 443 if called.scheme == "https" else 80
    if (default if called.port is None else called.port) != port:
        return False
    alike = {called.hostname, own.hostname} <= {"127.0.0.1", "localhost", "::1"}
    return host in ("0.0.0.0", "::") or alike or called.hostname == own.hostname


LOCK_PATIENCE = 40.0
"""Seconds that the services of a `keptset` that was killed may take to end."""


def prepare_again(argv: list[str], steps: int | None) -> Prepared:
    """The run in the directory that the arguments name, ready to go on: its lock is held.

    Args:
        argv: The directory alone.
        steps: How many the run is to have from now on; None: as many as it had.

    Raises ValueError if it is no run, is finished, is in use, or cannot go on from here or with these GPUs.
    """
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError(
            f"resume takes the run's directory and {STEPS}: all other settings are those of its start "
            f"(keptset resume runs/reverse-text {STEPS} 60)"
        )
    again = directory.reopen(Path(argv[0]), LOCK_PATIENCE)
    try:
        had = origin.settings_of(again)
        run = had if steps is None else with_steps(had, steps, again)
        done = len(MetricsTail(again.metrics).new_rows())
        if done >= run.orchestrator.steps and again.summary.exists():
            raise ValueError(
                f"{relative(again.path)} is finished: {done} of {run.orchestrator.steps} steps are done; "
                f"{STEPS} gives it more"
            )
        shares = gpus.shared_out(run, gpus.visible())
        chosen = choose_ports(run)
        if steps is not None:  # only now: who is refused leaves the run as it was
            origin.remember(run, again, _free(run))
            end, before = (one.trainer.optimizer.decay_steps for one in (run, had))
            if end != before:
                print(
                    f"keptset: the learning rate falls until step {end}, no longer {before}", file=sys.stderr
                )
        overrides = []
        for setting, port in chosen.items():
            overrides += [f"--{setting}", str(port)]
        return Prepared(origin.settings_of(again, overrides), again, shares)
    except BaseException:
        with again:
            raise


STEPS = "--orchestrator.steps"


def with_steps(run: RunSettings, steps: int, directory: directory.RunDirectory) -> RunSettings:
    """The run with more steps than it had, which nobody remembers yet.

    A learning rate that was to fall until the last step falls until the new one.

    Raises:
        ValueError: they are fewer.
    """
    had, optimizer = run.orchestrator.steps, run.trainer.optimizer
    if steps < had:
        raise ValueError(
            f"{STEPS} {steps}: the run has {had}; it can be given more, and ends earlier if it is stopped"
        )
    changed = [STEPS, str(steps)]
    if optimizer.schedule != "constant" and optimizer.decay_steps == had != steps:
        changed += ["--trainer.optimizer.decay_steps", str(steps)]
    return origin.settings_of(directory, changed)


def _free(run: RunSettings) -> list[str]:
    """Services whose ports were left open."""
    return [name for name in SERVICES if getattr(run, name).port == 0]


def choose_ports(run: RunSettings) -> dict[str, int]:
    """The port of each service by its setting: the one set, if it is free, or a free one for 0."""
    services: dict[str, InferenceSettings | TrainerSettings | OrchestratorSettings] = {
        "inference": run.inference,
        "trainer": run.trainer,
        "orchestrator": run.orchestrator,
    }
    chosen: dict[str, int] = {}
    for name, service in services.items():
        if service.port == 0:
            continue
        setting = f"{name}.port"
        ports.require_free(service.host, service.port, setting)
        chosen[setting] = service.port
    for name, service in services.items():
        if service.port == 0:
            chosen[f"{name}.port"] = ports.pick(service.host, set(chosen.values()))
    return chosen


def relative(path: Path) -> Path:
    """A path as short as it can be said from here."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
