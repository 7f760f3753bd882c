"""The command line: `--config FILE`, `--dry-run`, `--help`, `--version` and `--any.setting value`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from .errors import Problem, SettingsError
from .explain import known_keys
from .run import RunSettings
from .schema import alternatives, annotation_at, item_type, settings
from .suggest import nearest

FLAGS = {"help", "version", "dry_run"}
TRUE_OR_FALSE = {"true", "false", "1", "0", "yes", "no", "on", "off"}


@dataclass
class CommandLine:
    """What was asked for; `options` in the order given, each a path below the root and its text."""

    files: list[FilePath] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    options: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


def parse_command_line(argv: list[str], service: str | None) -> CommandLine:
    """Split the arguments of a service's command, or of a run's, whose files need no --config.

    `--key value` and `--key=value`, with `-` or `_` in names; a truth value may be left out if it is true.

    Raises:
        SettingsError: an argument that is no option, an option that does not exist or lacks its value.
    """
    parsed, problems, rest = CommandLine(), [], list(argv)
    root = () if service is None else (service,)
    while rest:
        argument = rest.pop(0)
        if service is None and not argument.startswith("-"):
            parsed.files.append(FilePath(argument))
            continue
        name, equals, text = ("help" if argument == "-h" else argument.removeprefix("--")).partition("=")
        key = name.replace("-", "_")
        if key in FLAGS and not equals:
            parsed.flags.add(key)
            continue
        path = (*root, *key.split("."))
        if not argument.startswith("--") or not name:
            what = "not an option; write --key value, and files as --config FILE"
            problems.append(Problem((), f"{argument}: {what}"))
            continue
        if key != "config" and annotation_at(RunSettings, path) is None:
            problems.append(Problem((), f"--{name}: unknown option, {_meant(key, path, root)}"))
            if not equals:
                _value(rest, None)
            continue
        if not equals:
            value = _value(rest, annotation_at(RunSettings, path))
            if value is None:
                problems.append(Problem((), f"--{name}: the value is missing; write --{name} VALUE"))
                continue
            text = value
        if key == "config":
            parsed.files.append(FilePath(text))
        else:
            parsed.options.append((path, text))
    if problems:
        raise SettingsError(problems)
    return parsed


def _value(rest: list[str], annotation: Any) -> str | None:
    """Take the value of an option off the arguments that follow it."""
    if annotation is not None and bool in alternatives(annotation):
        return rest.pop(0) if rest and rest[0].lower() in TRUE_OR_FALSE else "true"
    return rest.pop(0) if rest and not rest[0].startswith("--") else None


def _meant(key: str, path: tuple[str, ...], root: tuple[str, ...]) -> str:
    """The nearest option: what ends like this, else in the same table if that exists, else anywhere."""
    near, prefix = nearest(path[-1], known_keys(path[:-1])), path[len(root) : -1]
    for length in range(len(root) + 1, len(path)):
        if item_type(annotation_at(RunSettings, path[:length])) is not None:
            return f"lists are given as JSON: --{'.'.join(path[len(root) : length])} '[...]'"
    known = [".".join(s.path[len(root) :]) for s in settings(RunSettings) if s.path[: len(root)] == root]
    known = [name for name in dict.fromkeys(known) if "[]" not in name]  # no option reaches into a list
    below = [name for name in known if name.endswith(f".{key}")]
    if near and not below:
        return _did_you_mean(".".join((*prefix, name)) for name in near)
    near = below or nearest(key, [*known, *FLAGS, "config"])
    return _did_you_mean(near) if near else "see --help"


def _did_you_mean(names: Iterable[str]) -> str:
    written = ("--" + (name.replace("_", "-") if name in FLAGS else name) for name in names)
    return f"did you mean {' or '.join(written)}?"
