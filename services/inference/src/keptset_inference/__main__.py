"""`keptset-inference --config FILE.toml [--dry-run] [--key value ...]`."""

import asyncio
import atexit
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from keptset_settings import InferenceSettings, load_service

from .capture_choice import Choice
from .environment import prepare_environment
from .errors import StartError
from .interrupts import keep_interrupts
from .orphans import watch_over_children


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server; exits with 0 when it was asked to stop, 1 when it could not start or its engine
    died.
    """
    leave(run(load_service("inference", list(argv) if argv is not None else None)))


def leave(code: int) -> None:
    """End the process without taking the interpreter apart: that takes a second, and native libraries report
    as leaked, line by line, what the operating system is about to free.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(settings: InferenceSettings) -> int:
    """The exit code of one server."""
    try:
        capture = prepare_environment(settings)
        watch_over_children()
        keep_interrupts()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop_the_start)
        return asyncio.run(_serve(settings, capture))
    except StartError as error:
        print(f"keptset-inference: {error}", file=sys.stderr)
    except SystemExit as stopped:
        print("keptset-inference: stopped while starting", file=sys.stderr)
        return int(stopped.code or 0)
    except Exception as error:
        logging.getLogger("vllm.keptset").debug("start failed", exc_info=True)
        print(f"keptset-inference: cannot start: {_first_line(error)}", file=sys.stderr)
    return 1


def _stop_the_start(number: int, frame: FrameType | None) -> None:
    """Until vLLM's launcher takes the signals over. Not KeyboardInterrupt: vLLM swallows it as it starts."""
    raise SystemExit(128 + number)


async def _serve(settings: InferenceSettings, capture: Choice | None) -> int:
    from .server import serve  # vllm is imported after the environment is prepared

    await serve(settings, capture)
    return 0


def _first_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return " ".join(text.split())[:1000]


if __name__ == "__main__":
    main()
