"""What a run shows: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status

from keptset.metrics import Row
from keptset.summary import number


class Display:
    """Speaks to `console`; everything it shows is also readable when that is a file."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, label: str, text: str) -> None:
        """One fact."""
        self.console.print(f"  [bold]{label:<13}[/] {text}", highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self) -> Iterator["Waiting"]:
        """Shows for what the run waits."""
        if self.console.is_terminal:
            with self.console.status("") as status:
                yield Waiting(self, status)
        else:
            yield Waiting(self, None)

    @contextmanager
    def training(self, steps: int) -> Iterator["Training"]:
        """Shows the steps as they are done."""
        if not self.console.is_terminal:
            yield Training(self, steps, None)
            return
        columns = [
            TextColumn("  [bold]step[/]"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
        ]
        with Progress(*columns, console=self.console) as progress:
            yield Training(self, steps, progress)


class Waiting:
    """A status line that changes, or a plain line every ten seconds."""

    EVERY = 10.0

    def __init__(self, display: Display, status: Status | None) -> None:
        self._display, self._status = display, status
        self._next = self.EVERY

    def update(self, text: str, elapsed: float) -> None:
        """Says for what, and for how long so far (seconds)."""
        if self._status is not None:
            self._status.update(f"{text}, {elapsed:.0f} s")
        elif elapsed >= self._next:
            self._next = elapsed + self.EVERY
            self._display.line("", f"{text}, {elapsed:.0f} s")


class Training:
    """A bar with the latest row's numbers, or a plain line a step."""

    def __init__(self, display: Display, steps: int, progress: Progress | None) -> None:
        self._display, self._steps, self._progress = display, steps, progress
        self._last = time.monotonic()
        self._task = TaskID(0)
        if progress is not None:
            self._task = progress.add_task("", total=steps, shown="first rollouts")

    def row(self, row: Row) -> None:
        """Shows one more row of metrics.jsonl."""
        shown = (
            f"reward {number(row.get('reward/mean'))}  mismatch KL {number(row.get('mismatch_kl/mean'))}  "
            f"coverage {number(row.get('kept/coverage'))}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], shown=shown)
        else:
            self._display.line(f"step {row['step']}/{self._steps}", shown)
