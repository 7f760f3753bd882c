"""Loads the settings of one service or of a whole run: command line > environment > files > defaults."""

import sys
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Literal, overload

from pydantic import ValidationError

from .command_line import parse_command_line
from .errors import SettingsError
from .explain import explain
from .inference import InferenceSettings
from .orchestrator import OrchestratorSettings
from .resolve import resolve_run
from .run import RunSettings
from .toml import to_toml
from .trainer import TrainerSettings

Service = Literal["inference", "orchestrator", "trainer"]


@overload
def load_service(service: Literal["inference"], argv: list[str] | None = None) -> InferenceSettings: ...
@overload
def load_service(service: Literal["orchestrator"], argv: list[str] | None = None) -> OrchestratorSettings: ...
@overload
def load_service(service: Literal["trainer"], argv: list[str] | None = None) -> TrainerSettings: ...
def load_service(
    service: Service, argv: list[str] | None = None
) -> InferenceSettings | OrchestratorSettings | TrainerSettings:
    """What `keptset-<service> ARGV` was told; `argv` is sys.argv[1:] if not given."""
    try:
        line = parse_command_line(sys.argv[1:] if argv is None else argv, (service,))
        run, _whole = _read(line.files, line.options, service)
        settings: InferenceSettings | OrchestratorSettings | TrainerSettings = getattr(run, service)
    except SettingsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if "version" in line.flags:
        print(version("keptset-settings"))
        sys.exit(0)
    if "dry_run" in line.flags:
        print(to_toml(settings, service), end="")
        sys.exit(0)
    return settings


def load_run(argv: list[str] | None = None) -> RunSettings:
    """What `keptset run FILE.toml [--key value ...]` was told."""
    try:
        line = parse_command_line(sys.argv[1:] if argv is None else argv, (), positional_files=True)
        run, _ = _read(line.files, line.options, None)
    except SettingsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if "dry_run" in line.flags:
        print(to_toml(run), end="")
        sys.exit(0)
    return run


def _read(
    files: list[FilePath], options: list[tuple[tuple[str, ...], str]], service: str | None
) -> tuple[RunSettings, bool]:
    # Imported when needed: pydantic-settings takes longer to import than all of this library.
    from .sources import assign, merge, read_environment, read_toml

    from_files = merge(*[read_toml(path) for path in files])
    from_environment = read_environment()
    from_line: dict[str, object] = {}
    for path, text in options:
        assign(from_line, path, text)
    whole = service is None or bool(from_files.keys() - {service})
    if not whole:
        from_environment = {k: v for k, v in from_environment.items() if k == service}
    tree = merge(from_files, from_environment, from_line)
    try:
        run = RunSettings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(explain(error, tree)) from None
    return (resolve_run(run) if whole else run), whole
