"""Loads the settings of one service or of a whole run: command line > environment > files > defaults."""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from pydantic import ValidationError

from .command_line import CommandLine, parse_command_line
from .errors import Problem, SettingsError, SettingsWarning
from .explain import explain, truth_for_number
from .help import help_text
from .inference import InferenceSettings
from .orchestrator import OrchestratorSettings
from .resolve import examine_run, resolve_inference, resolve_orchestrator, resolve_run, resolve_trainer
from .run import RunSettings
from .toml import to_toml
from .trainer import TrainerSettings

if TYPE_CHECKING:
    from .sources import Gathered

Service = Literal["inference", "orchestrator", "trainer"]
ServiceSettings = InferenceSettings | OrchestratorSettings | TrainerSettings
S = TypeVar("S", RunSettings, ServiceSettings)

RESOLVE_ALONE: dict[Service, Callable[[Any], ServiceSettings]] = {
    "inference": resolve_inference,
    "orchestrator": resolve_orchestrator,
    "trainer": resolve_trainer,
}


@overload
def load_service(service: Literal["inference"], argv: Sequence[str] | None = None) -> InferenceSettings: ...
@overload
def load_service(
    service: Literal["orchestrator"], argv: Sequence[str] | None = None
) -> OrchestratorSettings: ...
@overload
def load_service(service: Literal["trainer"], argv: Sequence[str] | None = None) -> TrainerSettings: ...
def load_service(service: Service, argv: Sequence[str] | None = None) -> ServiceSettings:
    """The settings of `keptset-<service> ARGV`; `argv` is sys.argv[1:] if not given.

    The files hold the service's own table alone, or a whole run, which is resolved first. Exits with 2 and
    the problems on stderr if the settings cannot be used; with 0 after --help, --version and --dry-run, which
    prints TOML that loads to the same settings (without secrets). Warnings go to stderr as text.
    """
    return _load(f"keptset-{service}", argv, service, lambda line: _service(line, service))


def load_run(argv: Sequence[str] | None = None) -> RunSettings:
    """The resolved settings of `keptset run FILE.toml ... [--any.setting value ...]`.

    Prints and exits like `load_service`.
    """
    return _load("keptset", argv, None, _run)


def read_run(files: Sequence[FilePath | str], overrides: Sequence[str] = ()) -> RunSettings:
    """Like `load_run`, as a function: neither exits nor prints; warns with SettingsWarning.

    Raises:
        SettingsError: all problems that were found.
    """
    return _run(parse_command_line([*map(str, files), *overrides], None))


@dataclass(frozen=True)
class Examination:
    """What there is to say of the settings of a run."""

    written: RunSettings | None
    """As they were written; None if they cannot be read as settings at all."""

    resolved: RunSettings | None
    """As far as they can be resolved."""

    problems: list[Problem]
    """What is refused, each with its way out. None: the run can start."""

    notes: list[Problem]
    """What was decided for the user."""


def examine_settings(argv: Sequence[str]) -> Examination:
    """What `FILE.toml ... [--any.setting value ...]` comes to; neither raises nor prints nor exits."""
    try:
        run, gathered = _gathered(parse_command_line(list(argv), None), None)
    except SettingsError as error:
        return Examination(None, None, error.problems, [])
    resolved, findings = examine_run(run)
    problems = SettingsError(findings.problems).with_origins(gathered.origin).problems
    return Examination(run, resolved, problems, [*gathered.notes, *findings.notes])


def _run(line: CommandLine) -> RunSettings:
    return _resolved(line, None, lambda run, whole: resolve_run(run))


def _service(line: CommandLine, service: Service) -> ServiceSettings:
    def resolve(run: RunSettings, whole: bool) -> ServiceSettings:
        if not whole:
            return RESOLVE_ALONE[service](getattr(run, service))
        settings: ServiceSettings = getattr(resolve_run(run), service)
        return settings

    return _resolved(line, service, resolve)


def _resolved(line: CommandLine, service: Service | None, resolve: Callable[[RunSettings, bool], S]) -> S:
    run, gathered = _gathered(line, service)
    for note in gathered.notes:
        warnings.warn(str(note), SettingsWarning, stacklevel=2)
    try:
        return resolve(run, gathered.whole_run)
    except SettingsError as error:
        raise error.with_origins(gathered.origin) from None


def _gathered(line: CommandLine, service: Service | None) -> "tuple[RunSettings, Gathered]":
    """The settings as they were written, and where each comes from."""
    # Imported when needed: pydantic-settings takes longer to import than everything else here.
    from .sources import gather

    gathered = gather(line.files, line.options, service)
    problems = truth_for_number(gathered.tree)
    try:
        run = RunSettings.model_validate(gathered.tree)
    except ValidationError as error:
        problems += explain(error, gathered.tree)
    refused = {problem.path for problem in problems}
    problems += [problem for problem in gathered.problems if problem.path not in refused]
    if problems:
        raise SettingsError(problems).with_origins(gathered.origin)
    return run, gathered


def _load(
    command: str, argv: Sequence[str] | None, service: Service | None, read: Callable[[CommandLine], S]
) -> S:
    try:
        line = parse_command_line(sys.argv[1:] if argv is None else list(argv), service)
        if "help" in line.flags:
            print(help_text(command, service), end="")
            sys.exit(0)
        if "version" in line.flags:
            print(command, _version(command))
            sys.exit(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SettingsWarning)
            settings = read(line)
    except SettingsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for warning in caught:
        if issubclass(warning.category, SettingsWarning):
            print(f"warning: {warning.message}", file=sys.stderr)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if "dry_run" in line.flags:
        print(to_toml(settings, service), end="")
        sys.exit(0)
    return settings


def _version(command: str) -> str:
    try:
        return version(command)
    except PackageNotFoundError:  # this library alone, without the command
        return version("keptset-settings")
