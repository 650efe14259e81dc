"""Everything that this project prints: progress of long work, messages, and the summary at the end.

Progress and messages go to standard error, results to standard output, so that a result can be piped. On a terminal
progress is a bar that redraws itself; elsewhere each step is one plain line.
"""

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TextIO

__all__ = ["Progress", "fail", "pass_on", "result", "say", "summary"]


def say(text: str) -> None:
    """Prints a message for the person who watches."""
    print(text, file=sys.stderr, flush=True)


def fail(text: str) -> None:
    """Prints why the command ends, each line marked."""
    for line in text.splitlines():
        say(f"error: {line}")


def result(text: str) -> None:
    """Prints what the command was asked for, to standard output. A reader that has left (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits


def pass_on(text: str) -> None:
    """Prints a piece of another process's output to standard output as it is."""
    print(text, end="", flush=True)


def summary(title: str, rows: Mapping[str, object], then: Mapping[str, str] | None = None) -> None:
    """Prints a titled two-column table to standard output, and below it what may be typed next: purpose -> text."""
    then = then or {}
    width = max((len(name) for name in (*rows, *then)), default=0)
    lines = [title, *_table(rows, width), *(["next", *_table(then, width)] if then else [])]
    result("\n".join(lines))


def _table(rows: Mapping[str, object], width: int) -> list[str]:
    return [f"  {name:<{width}}  {_value_text(value)}" for name, value in rows.items()]


def _value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Progress:
    """Progress of work whose number of steps is known. Use as a context manager, in one thread.

    States: made -> entered -> left. `step` may only be called while entered.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, every: int = 1, stream: TextIO | None = None) -> None:
        """Makes the display, shown on entry.

        Args:
            title: what is being done.
            total: steps of the whole work.
            done: steps finished before now, by an earlier process.
            every: on a stream that is not a terminal, one line per this many steps, and one for the last.
            stream: where to; standard error by default.
        """
        self._title, self._total, self._done, self._every = title, total, done, every
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._start_s = self._last_s = time.monotonic()

    def __enter__(self) -> Self:
        self._start_s = self._last_s = time.monotonic()
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                "{task.fields[values]}",
            )
            self._bar = Bar(
                *(TextColumn(c) if isinstance(c, str) else c for c in columns), console=Console(file=self._stream)
            )
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, values="")
            self._bar.start()
        return self

    def step(self, values: Mapping[str, object] | None = None) -> None:
        """Counts one step and shows its values."""
        self._done += 1
        now_s = time.monotonic()
        text = "  ".join(f"{name} {_value_text(value)}" for name, value in (values or {}).items())
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, values=text)
        elif self._done % self._every == 0 or self._done == self._total:
            width = len(str(self._total))
            seconds = f"{now_s - self._last_s:.1f} s"
            print(
                f"{self._title} {self._done:>{width}}/{self._total}  {text}  {seconds}", file=self._stream, flush=True
            )
            self._last_s = now_s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
