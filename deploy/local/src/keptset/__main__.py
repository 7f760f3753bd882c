"""The command `keptset`."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from keptset.supervisor import ProcessDied, Stopped
from keptset_settings import settings_help

USAGE = """\
usage: keptset COMMAND CONFIG.toml [--section.key value ...]
       keptset resume RUN

  keptset run CONFIG.toml     train on this machine: starts inference, trainer and orchestrator, ends them all
      --name NAME             directory below --runs-dir; left out, a number is added if it exists
      --runs-dir DIRECTORY    where runs live (default: runs)
      --overwrite             delete an earlier run of that name
      --dry-run               print the resolved settings and exit
      --restarts N            start a service that died again, up to N times until the next step is finished
  keptset resume RUN          go on with a run that was stopped or killed; RUN is its directory
      --orchestrator.steps N  give it more steps, finished or not
  keptset compare CONFIG.toml three trainings: not truncated, truncated with replay, truncated without
      --output PICTURE.png    the picture (default: docs/compare.png); numbers go beside it as .json
      --arms NAME,NAME        only these of no-truncation, replay, no-replay
      --drawn                 run nothing, draw what has run (arms that ran apart, each on a GPU of its own)
  keptset check CONFIG.toml   what each source comes to, where capture is on, what is refused and the way out;
                              exit code 1 if something is refused
      --write DIRECTORY       also write the resolved configs, one for each inference server
  keptset replay RUN          score a stored step of a run again and look at its importance ratios;
                              exit code 1 if they are not healthy, 2 if the step cannot be scored
      --step N                which one (default: the newest); `keptset-trainer replay --help` lists the rest
  keptset --version

Any setting can be given as --section.key value (--orchestrator.steps 10) or as an environment variable
(KEPTSET_ORCHESTRATOR__STEPS=10). The command line wins over the environment, that over the file. Several
files may be named, of which later ones win. `keptset run --help` lists all settings.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 failed, 2 wrong arguments, 128 + n signal n."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        if arguments and not arguments[0].startswith("-"):
            print(settings_help(None), end="")
        return 0 if arguments else 2
    if arguments == ["--version"]:
        print(f"keptset {version('keptset')}")
        return 0
    command, *rest = arguments
    if command not in ("run", "resume", "compare", "check", "replay"):
        return _fail(
            f"{command!r} is no command; known are run, resume, compare, check and replay (keptset --help)", 2
        )
    told = any(name.startswith("KEPTSET_") for name in os.environ)
    configured = command in ("run", "compare", "check")
    if configured and not told and all(argument.startswith("-") for argument in rest):
        way_out = f"write keptset {command} CONFIG.toml (keptset --help)"
        return _fail(f"{command}: no configuration is named; {way_out}", 2)
    console = Console()
    try:
        if command == "check":
            from keptset.check import check

            directory = _option(rest, "--write", "")
            return check(rest, Path(directory) if directory else None)
        if command == "replay":
            from keptset.replay import replay

            return replay(rest)
        if command == "run":
            from keptset.run import run

            run(rest, _flag(rest, "--overwrite"), console)
        elif command == "resume":
            from keptset.resolve import STEPS
            from keptset.run import resume

            given = any(argument.partition("=")[0] == STEPS for argument in rest)
            steps = _whole(STEPS, _option(rest, STEPS, "")) if given else None
            resume(rest, steps, console)
        else:
            from keptset.compare import compare

            output, names = Path(_option(rest, "--output", "docs/compare.png")), _option(rest, "--arms", "")
            drawn = _flag(rest, "--drawn")
            compare(rest, output, console, names, drawn)
    except Stopped as stopped:
        said = "".join(f"; {note}" for note in getattr(stopped, "__notes__", []))
        return _fail(f"stopped by {stopped}; nothing is left running{said}", 128 + stopped.number)
    except (ProcessDied, TimeoutError, FileExistsError, ValueError, RuntimeError) as error:
        return _fail("\n".join([str(error), *getattr(error, "__notes__", [])]), 1)
    except OSError as error:  # the disk is full, or what we write to cannot be written to
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _fail("\n".join([said, *getattr(error, "__notes__", [])]), 1)
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


def _whole(name: str, text: str) -> int:
    """The number that an option says."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: {text!r} is no whole number")
    return int(text)


def _fail(text: str, code: int) -> int:
    print(f"keptset: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
