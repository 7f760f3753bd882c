"""keptset-orchestrator --config FILE.toml: drives a run to its end, or stops with one line that says why."""

import asyncio
import logging
import signal
import sys

from keptset_settings import OrchestratorSettings, load_service

from .app import make_app, serving
from .errors import OrchestratorError
from .guards import guarded
from .progress import Progress
from .run import run

log = logging.getLogger("keptset_orchestrator")


def main(argv: list[str] | None = None) -> int:
    """Run to the end.

    Returns:
        0 when all steps are done, 1 after an error, 128 + the signal's number after SIGTERM or SIGINT.
    """
    settings = load_service("orchestrator", argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
    )
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    debug = settings.log_level == "debug"
    try:
        return asyncio.run(drive(settings))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # before there was anything to stop
    except (OrchestratorError, ValueError, OSError) as error:
        log.error("%s", _one_line(error), exc_info=debug)
    except Exception as error:
        log.error(
            'unexpected %s: %s (log_level = "debug" shows where)',
            type(error).__name__,
            _one_line(error),
            exc_info=debug,
        )
    return 1


async def drive(settings: OrchestratorSettings) -> int:
    """Serve the routes and run, until the end or a signal; returns the exit code."""
    progress = Progress(steps=settings.steps)
    loop = asyncio.get_running_loop()
    received: list[int] = []
    async with serving(guarded(make_app(progress), settings), settings.host, settings.port) as port:
        log.info("status on http://%s:%d/keptset/v1/status", settings.host, port)
        task = asyncio.create_task(run(settings, progress))

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise
            name = signal.Signals(received[0]).name
            log.info(
                "stopped by %s in step %d (%s); start again to go on", name, progress.step, progress.state
            )
            return 128 + received[0]
        except BaseException as error:
            progress.state, progress.error = "failed", _one_line(error)
            raise
    return 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
