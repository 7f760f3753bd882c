"""From arguments to a run that can start: its settings, its directory, its ports."""

import io
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

from keptset import directory, ports
from keptset_settings import InferenceSettings, OrchestratorSettings, RunSettings, TrainerSettings, load_run


@dataclass(frozen=True)
class Prepared:
    """Resolved settings and the fresh directory that they point into."""

    run: RunSettings
    directory: directory.RunDirectory


def prepare(argv: list[str], overwrite: bool) -> Prepared:
    """Resolves a run's arguments, chooses ports and makes its directory.

    Exits with code 2 and reasons if the settings are wrong, with code 0 after printing them if `--dry-run`
    is among the arguments. Raises ValueError if a port is taken, FileExistsError if the directory is.
    """
    run = load_run(argv)
    if run.inference.model is None:
        raise ValueError(
            "inference.model is not set: name a model's directory, or add [warm_start] to have one made"
        )
    chosen = choose_ports(run)
    exact = any(argument.partition("=")[0] == "--name" for argument in argv)
    made = directory.create(run.runs_dir, run.name, exact=exact, overwrite=overwrite)
    overrides = ["--name", made.path.name]
    for setting, port in chosen.items():
        overrides += [f"--{setting}", str(port)]
    # A second time, because paths and URLs follow from name and ports. What there is to say has been said.
    with redirect_stderr(io.StringIO()):
        return Prepared(load_run([*argv, *overrides]), made)


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


def base_url(host: str, port: int) -> str:
    """Where this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def relative(path: Path) -> Path:
    """A path as short as it can be said from here."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
