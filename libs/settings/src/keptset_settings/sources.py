"""Where settings come from: TOML files, environment variables, options. Each becomes a nested dictionary."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from functools import partial
from pathlib import Path as FilePath
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource

from .errors import Path, Problem, SettingsError
from .explain import known_keys, unknown_key
from .kinds import leave_kinds
from .run import RunSettings
from .schema import MISSING, annotation_at, child, is_open, is_structured
from .secret_files import read_secret_files, secret_file_variables
from .toml import DELIMITER, PREFIX
from .toml_types import loose_types

Tree = dict[str, Any]
Options = Sequence[tuple[tuple[str, ...], str]]

# What Kubernetes and Docker links tell a container about a service called keptset-...: no settings of ours.
SERVICE_LINK = re.compile(
    r"(?!.*__).+?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|(?P<bare>PORT))"
)


class _RunFromEnvironment(RunSettings, BaseSettings):  # type: ignore[misc]  # both define model_config
    """RunSettings as pydantic-settings wants it in order to read the environment."""


@dataclass(frozen=True)
class _Layer:
    tree: Tree
    name: Callable[[Path], str]
    """How this source names a path that it holds."""


@dataclass(frozen=True)
class Gathered:
    """What all sources say together, not validated."""

    tree: Tree
    """As a RunSettings would be written."""

    whole_run: bool
    """False: only the table of one service counts."""

    layers: Sequence[_Layer]
    """The sources, the winning one first."""

    notes: Sequence[Problem] = ()
    """What was left out because a kind took the place of another."""

    problems: Sequence[Problem] = ()
    """What a file wrote in a type that is not the setting's."""

    def origin(self, path: Path) -> str | None:
        """Which option, variable or file set this path; None if it is a default."""
        return _origin(self.layers, path)


def gather(files: Sequence[FilePath], options: Options, service: str | None) -> Gathered:
    """Read all sources: options > environment > later files > earlier files.

    With `service`, files that hold nothing but its table make its settings alone: what the environment says
    to others is checked for unknown keys, and does not count.

    Raises:
        SettingsError: a file that cannot be read, a variable that cannot be understood.
    """
    from_files = [_Layer(read_toml(file), partial(_file, file)) for file in reversed(files)]
    whole_run = service is None or any(layer.tree.keys() - {service} for layer in from_files)
    environment, names = read_environment(), environment_names()
    if not whole_run:
        _reject_unknown({key: value for key, value in environment.items() if key != service}, names)
        environment = {key: value for key, value in environment.items() if key == service}
    from_options: Tree = {}
    for path, text in options:
        _assign(from_options, path, text)
    layers = [
        _Layer(from_options, partial(_option, options, 0 if service is None else 1)),
        _Layer(environment, partial(_variable, names)),
        *from_files,
    ]
    tree, notes = Tree(), list[Problem]()
    for n in range(len(layers) - 1, -1, -1):
        notes += leave_kinds(tree, layers[n].tree, layers[n].name, partial(_origin, layers[n + 1 :]))
        tree = merge(tree, layers[n].tree)
    loose = [problem for layer in from_files for problem in loose_types(layer.tree, layer.name(()))]
    return Gathered(tree, whole_run, layers, notes, loose)


def merge(*trees: Mapping[str, Any]) -> Tree:
    """Later trees win, key by key; lists are replaced as a whole. The trees themselves stay as they are."""
    merged: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            below = merged.get(key)
            if isinstance(value, dict):
                merged[key] = merge(below if isinstance(below, dict) else {}, value)
            else:
                merged[key] = value
    return merged


def read_toml(path: FilePath) -> Tree:
    """Read one file.

    Raises:
        SettingsError: it is missing, not readable or not TOML; the text names file and line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problem = "no such file; name an existing one"
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}"
    except tomllib.TOMLDecodeError as error:
        problem = f"not TOML: {error}"
    raise SettingsError([Problem((), f"{path}: {problem}")])


def read_environment() -> Tree:
    """What KEPTSET_... variables say: `__` between tables, lists and dictionaries as JSON; empty: not set.

    Raises:
        SettingsError: a list or a table that is not JSON.
    """
    unknown: Tree = {}
    problems = []
    for name in environment_names():
        path = tuple(name[len(PREFIX) :].lower().split(DELIMITER))
        if path[0] not in RunSettings.model_fields:
            unknown[path[0]] = os.environ[name]  # pydantic-settings skips these; validation rejects them
        elif (annotation := annotation_at(RunSettings, path)) is not Any and is_structured(annotation):
            try:
                json.loads(os.environ[name])
            except ValueError as error:
                problems.append(Problem(path, f"must be JSON: {error}", origin=name))
    if problems:
        raise SettingsError(problems)
    source = EnvSettingsSource(
        _RunFromEnvironment,
        case_sensitive=False,
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        env_ignore_empty=True,
    )
    files = secret_file_variables()
    source.env_vars = {name: text for name, text in source.env_vars.items() if name.upper() not in files}
    known: Tree = source()
    tree: Tree = _parse_open({**known, **unknown}, ())
    for secret, text in read_secret_files(os.environ).items():
        _assign(tree, secret, text)
    return tree


def environment_names() -> list[str]:
    """The variables that are meant for us."""
    files = secret_file_variables()
    ours = (name for name, text in os.environ.items() if text and _is_ours(name.upper(), text))
    return sorted(name for name in ours if name.upper() not in files)


def parse_value(text: str) -> Any:
    """A value as TOML or JSON would write it; anything else is the text itself.

    >>> parse_value("512"), parse_value('{"head_dtype": "float32"}'), parse_value("float32")
    (512, {'head_dtype': 'float32'}, 'float32')
    """
    try:
        table = tomllib.loads(f"value = {text}")
        if table.keys() == {"value"} and not isinstance(table["value"], date | time):
            return table["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_ours(name: str, text: str) -> bool:
    if not name.startswith(PREFIX):
        return False
    link = SERVICE_LINK.fullmatch(name)
    return link is None or (link["bare"] is not None and "://" not in text)


def _parse_open(value: Any, path: Path) -> Any:
    """Numbers and truth values inside vllm and extra_body come as text and are parsed here."""
    if isinstance(value, dict):
        return {key: _parse_open(below, (*path, key)) for key, below in value.items()}
    return parse_value(value) if isinstance(value, str) and annotation_at(RunSettings, path) is Any else value


def _reject_unknown(tree: Tree, names: Sequence[str]) -> None:
    problems = []

    def visit(value: Any, path: Path) -> None:
        annotation = annotation_at(RunSettings, path)
        if annotation is None:
            problems.append(unknown_key(path, known_keys(path[:-1]), _variable(names, path)))
        elif isinstance(value, dict) and annotation is not Any and not is_open(annotation):
            for key, below in value.items():
                visit(below, (*path, key))

    visit(tree, ())
    if problems:
        raise SettingsError(problems)


def _assign(tree: Tree, path: tuple[str, ...], text: str) -> None:
    """Put the text of an option where it belongs."""
    annotation = annotation_at(RunSettings, path)
    parse = annotation is Any or (annotation is not None and is_structured(annotation))
    for key in path[:-1]:
        if not isinstance(tree.setdefault(key, {}), dict):
            tree[key] = {}
        tree = tree[key]
    tree[path[-1]] = parse_value(text) if parse else text


def _origin(layers: Sequence[_Layer], path: Path) -> str | None:
    """How the first of these sources that holds a path names it; None if none does."""
    return next((layer.name(path) for layer in layers if path and _holds(layer.tree, path)), None)


def _holds(tree: Any, path: Path) -> bool:
    for key in path:
        tree = child(tree, key)
    return tree is not MISSING


def _file(file: FilePath, path: Path) -> str:
    return str(file)


def _variable(names: Sequence[str], path: Path) -> str:
    """The variable that set a path: the one of its longest beginning."""
    spelled = [(PREFIX + DELIMITER.join(map(str, path[:n]))).upper() for n in range(len(path), 0, -1)]
    by_upper = {name.upper(): name for name in names}
    return next((by_upper[name] for name in spelled if name in by_upper), spelled[0])


def _option(options: Options, skip: int, path: Path) -> str:
    given = {option for option, _ in options}
    length = next((n for n in range(len(path), 0, -1) if path[:n] in given), len(path))
    return "--" + ".".join(map(str, path[skip:length]))
