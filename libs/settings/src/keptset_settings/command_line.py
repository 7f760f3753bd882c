"""The command line: `--config FILE`, `--dry-run`, `--help`, `--version` and `--any.setting value`."""

from dataclasses import dataclass, field
from pathlib import Path as FilePath

from .errors import SettingsError
from .run import RunSettings
from .schema import alternatives, annotation_at

FLAGS = {"help", "version", "dry_run"}
TRUE_OR_FALSE = {"true", "false", "1", "0", "yes", "no", "on", "off"}


@dataclass
class CommandLine:
    """What was asked for; `options` in the order given, each a path below the root and its text."""

    files: list[FilePath] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    options: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


def parse_command_line(argv: list[str], root: tuple[str, ...], positional_files: bool = False) -> CommandLine:
    """Split the arguments of a command whose settings live under `root`.

    `--key value` and `--key=value`, with `-` or `_` in names; a truth value may be left out.

    Raises:
        SettingsError: an argument that is no option, or an option without its value.
    """
    parsed, problems, rest = CommandLine(), [], list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            argument = "--help"
        if not argument.startswith("--") or argument == "--":
            if positional_files and not argument.startswith("-"):
                parsed.files.append(FilePath(argument))
            else:
                problems.append(
                    f"{argument}: not an option; settings are given as --key value, files as --config FILE.toml"
                )
            continue
        name, equals, text = argument[2:].partition("=")
        key = name.replace("-", "_")
        if key in FLAGS:
            parsed.flags.add(key)
            continue
        path = (*root, *key.split("."))
        if not equals:
            annotation = annotation_at(RunSettings, path)
            if annotation is not None and bool in alternatives(annotation):
                text = rest.pop(0) if rest and rest[0].lower() in TRUE_OR_FALSE else "true"
            elif rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            else:
                problems.append(f"--{name}: the value is missing; write --{name} VALUE or --{name}=VALUE")
                continue
        if key == "config":
            parsed.files.append(FilePath(text))
        else:
            parsed.options.append((path, text))
    if problems:
        raise SettingsError(problems)
    return parsed
