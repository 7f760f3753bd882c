"""Child processes of a run: a group and a log each, none left behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from keptset import groups

TAIL_LINES = 20
"""Lines of a dead process's log that are shown."""

GRACE = 15.0
"""Seconds that a process gets between SIGTERM and SIGKILL, unless it needs more."""

CAUSE_GRACE = 2.0
"""Seconds that the cause of a death may take to die as well."""

PROPER_ENDS = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a process that SIGTERM ended, and of one that says so itself."""


class ProcessDied(RuntimeError):
    """A process of the run ended that should not have; the text shows the last lines of its log."""

    def __init__(self, process: "Process") -> None:
        self.process = process
        self.name, self.code, self.log = process.name, process.popen.returncode, process.log
        super().__init__(
            f"{self.name} died ({describe_exit(self.code)}); the end of {self.log}:\n{indent(tail(self.log))}"
        )


class Stopped(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. Not an Exception: nobody on the way up may swallow it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@dataclass
class Process:
    """One started command, leader of its own process group."""

    name: str
    """How people call it: inference, trainer, orchestrator."""
    popen: "subprocess.Popen[bytes]"
    log: Path
    """Standard output and error together."""
    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    """None: ours."""
    may_end: bool = False
    """Whether exit code 0 is its proper end; a service that ends by itself is dead, whatever its code."""
    grace: float = GRACE
    """Seconds that it gets between SIGTERM and SIGKILL."""
    started: float = field(default_factory=time.monotonic)

    def died(self) -> bool:
        """Whether it ended that should not have."""
        code = self.popen.poll()
        return code is not None and not (code == 0 and self.may_end)


class Supervisor:
    """Starts commands and ends them all on the way out, newest first. To be used from the main thread.

    While it is open SIGINT, SIGTERM and SIGHUP raise Stopped; during the way out a second one makes it
    SIGKILL what still runs. If this process is itself killed, a watcher ends them (keptset.watcher).
    """

    def __init__(self, held: Sequence[int] = ()) -> None:
        self.held = held
        """File descriptors that stay open until the last process has ended, whoever ends it: locks."""
        self.processes: list[Process] = []
        self._hurry = False
        self._closing = False
        self._starting = False
        self._unwatched = False
        self._pending: int | None = None

    def __enter__(self) -> "Supervisor":
        self._watcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "keptset.watcher"],
            stdin=subprocess.PIPE,
            pass_fds=self.held,
            bufsize=0,  # or closing would try once more to write what a watcher that is gone did not take
            start_new_session=True,  # a signal to our group must not reach it
        )
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        if isinstance(error, Stopped) and self.processes:
            each = [f"{process.name} (at most {process.grace:g} s)" for process in reversed(self.processes)]
            _say(f"{error}: stopping {', '.join(each)}; once more kills them")
        for process in reversed(self.processes):
            self._end(process)
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait(timeout=60)  # a run that ends at once may find it still starting
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        may_end: bool = False,
        grace: float = GRACE,
    ) -> Process:
        """Starts a command in its own session, its output in `log`; the default environment is ours."""
        self._starting = True  # a signal in here waits, or it could leave a child that nobody has listed
        try:
            with log.open("ab") as output:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            process = Process(name, popen, log, command, environment, may_end, grace)
            self.processes.append(process)
            self._tell(f"+{popen.pid}")
        finally:
            self._starting = False
        if self._pending is not None:
            self._on_signal(self._pending, None)
        return process

    def check(self) -> None:
        """Raises ProcessDied for the first process, in order of start, that ended and should not have."""
        if not any(process.died() for process in self.processes):
            return
        # The newest talks to the others. If it gives up on one that is about to die, that one is the cause;
        # one that was killed has not given up.
        deadline = time.monotonic() + CAUSE_GRACE
        while (
            not any(process.died() for process in self.processes[:-1])
            and self.processes[-1].popen.returncode >= 0
            and time.monotonic() < deadline
        ):
            time.sleep(groups.POLL)
        raise ProcessDied(next(process for process in self.processes if process.died()))

    def restart(self, process: Process) -> Process:
        """Ends what is left of a process and starts its command again, in its place in the order."""
        place = self.processes.index(process)
        self._end(process)
        again = self.start(
            process.name, process.command, process.log, process.environment, process.may_end, process.grace
        )
        self.processes.pop()
        self.processes[place] = again
        return again

    def end(self, process: Process) -> None:
        """Ends one process and its group; afterwards it counts as neither running nor dead."""
        self._end(process)
        self.processes.remove(process)

    def _end(self, process: Process) -> None:
        running = process.popen.poll() is None
        groups.end(process.popen.pid, process.grace, lambda: self._hurry)
        code = process.popen.wait(timeout=5)
        if running and not self._hurry and code not in (0, *PROPER_ENDS):
            within = f" after {process.grace:g} s" if code == -signal.SIGKILL else ""
            _say(
                f"told to stop, {process.name} did not end as it should ({describe_exit(code)}{within}); the "
                f"end of {process.log}:\n{indent(tail(process.log))}"
            )
        self._tell(f"-{process.popen.pid}")

    def _tell(self, line: str) -> None:
        assert self._watcher.stdin is not None
        try:
            self._watcher.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:  # what we end ourselves still ends
            if not self._unwatched:
                _say(
                    "somebody ended keptset.watcher; should this process be killed now, its services would "
                    "stay behind"
                )
            self._unwatched = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._starting:
            self._pending = number
        elif self._closing:
            self._hurry = True
        else:
            self._closing = True
            raise Stopped(number)


def _say(text: str) -> None:
    # Ctrl-C ends all of a pipeline, whoever reads this too; services still end in order.
    with suppress(OSError):
        print(f"keptset: {text}", file=sys.stderr, flush=True)


def describe_exit(code: int) -> str:
    """An exit code as subprocess gives it, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:]) or "(it is empty)"


def indent(text: str) -> str:
    """Sets quoted lines apart."""
    return "\n".join(f"  | {line}" for line in text.splitlines())
