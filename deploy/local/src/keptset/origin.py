"""What a run's directory remembers of its start, so that `keptset resume` goes on exactly as it began."""

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from keptset.directory import RunDirectory
from keptset_settings import (
    RunSettings,
    SettingsError,
    reachable,
    read_run,
    secret_variables,
    set_secrets,
    to_toml,
)


def remember(run: RunSettings, directory: RunDirectory, free_ports: Sequence[str]) -> None:
    """Write run.toml, the resolved settings, and origin.json.

    Ports that were chosen are written as 0, and the URLs that follow from ports are left out: the run may go
    on with others.

    Args:
        run: Resolved.
        directory: Of the run.
        free_ports: Services whose port was chosen.
    """
    saved = run.model_copy(deep=True)
    for service in free_ports:
        getattr(saved, service).port = 0
    if run.orchestrator.inference_urls == [reachable(run.inference.host, run.inference.port)]:
        saved.orchestrator.inference_urls = []
    if run.orchestrator.trainer_url == reachable(run.trainer.host, run.trainer.port):
        saved.orchestrator.trainer_url = None
    directory.settings.write_text(to_toml(saved))
    origin = {"folder": str(Path.cwd()), "secrets": sorted(set_secrets(run))}
    directory.origin.write_text(json.dumps(origin, indent=1) + "\n")


def settings_of(directory: RunDirectory, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a run, resolved again; goes to the folder that it was started in, as paths begin there.

    What KEPTSET_ variables say now does not count, secrets apart.

    Raises:
        ValueError: the run cannot go on from here; the text says why and the way out.
    """
    try:
        origin = json.loads(directory.origin.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{directory.path} has no {directory.origin.name}: it was made by an earlier version of keptset, "
            "or its start was interrupted; start the run anew"
        ) from None
    folder = Path(origin["folder"])
    if not folder.is_dir():
        raise ValueError(
            f"{directory.path} was started in {folder}, which is not there: its paths begin there"
        )
    os.chdir(folder)
    with _secrets_only(), redirect_stderr(io.StringIO()):
        try:
            run = read_run([directory.settings], overrides)
        except SettingsError as error:
            raise ValueError(f"{directory.settings} was changed, and cannot be used:\n{error}") from error
    if (run.runs_dir / run.name).resolve() != directory.path:
        raise ValueError(
            f"{directory.path} was {run.runs_dir / run.name} when it started, and its files say so: "
            "move it back"
        )
    missing = sorted(set(origin["secrets"]) - set(set_secrets(run)))
    if missing:
        raise ValueError(
            f"{directory.path} was started with {', '.join(missing)}; secrets are never written, so set "
            f"{'it' if len(missing) == 1 else 'them'} again"
        )
    return run


@contextmanager
def _secrets_only() -> Iterator[None]:
    known = secret_variables()
    others = {
        name: text
        for name, text in os.environ.items()
        if name.upper().startswith("KEPTSET_") and name.upper() not in known
    }
    for name in others:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(others)
