"""The command `keptset`."""

import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from keptset.supervisor import ProcessDied, Stopped

USAGE = """\
usage: keptset COMMAND CONFIG.toml [--section.key value ...]

  keptset run CONFIG.toml     train on this machine: starts inference, trainer and orchestrator, ends them all
      --name NAME             directory below --runs-dir; left out, a number is added if it exists
      --runs-dir DIRECTORY    where runs live (default: runs)
      --overwrite             delete an earlier run of that name
      --dry-run               print the resolved settings and exit
  keptset compare CONFIG.toml three trainings: not truncated, truncated with replay, truncated without
      --output PICTURE.png    the picture (default: docs/compare.png); numbers go beside it as .json
  keptset check CONFIG.toml   what each source comes to, where capture is on, what is refused and the way out;
                              exit code 1 if something is refused
      --write DIRECTORY       also write the resolved configs, one for each inference server
  keptset --version

Any setting can be given as --section.key value (--orchestrator.steps 10) or as an environment variable
(KEPTSET_ORCHESTRATOR__STEPS=10). The command line wins over the environment, that over the file.
`python -m keptset_settings` lists all settings.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 failed, 2 wrong arguments, 128 + n signal n."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments == ["--version"]:
        print(f"keptset {version('keptset')}")
        return 0
    command, *rest = arguments
    if command not in ("run", "compare", "check"):
        return _fail(f"{command!r} is no command; known are run, compare and check (keptset --help)", 2)
    console = Console()
    try:
        if command == "check":
            from keptset.check import check

            directory = _option(rest, "--write", "")
            return check(rest, Path(directory) if directory else None)
        if command == "run":
            from keptset.run import run

            run(rest, _flag(rest, "--overwrite"), console)
        else:
            from keptset.compare import compare

            compare(rest, Path(_option(rest, "--output", "docs/compare.png")), console)
    except Stopped as stopped:
        return _fail(f"stopped by {stopped}; nothing is left running", 128 + stopped.number)
    except (ProcessDied, TimeoutError, FileExistsError, ValueError, RuntimeError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:  # before or after anything ran
        return 130
    return 0


def _flag(arguments: list[str], name: str) -> bool:
    """Takes a flag of our own out of arguments that are otherwise settings."""
    present = name in arguments
    while name in arguments:
        arguments.remove(name)
    return present


def _option(arguments: list[str], name: str, default: str) -> str:
    """Likewise an option with a value."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return arguments.pop(i).partition("=")[2]
        if argument == name:
            if i + 1 == len(arguments):
                raise ValueError(f"{name}: the value is missing")
            arguments.pop(i)
            return arguments.pop(i)
    return default


def _fail(text: str, code: int) -> int:
    print(f"keptset: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
