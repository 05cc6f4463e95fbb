"""Progress on stderr: a bar that vanishes on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, Self

from ..report.words import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Reporter(Protocol):
    """What the command line hands to the stages; a `records.Progress` that opens and closes."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def __call__(self, stage: str, detail: str, done: int, total: int) -> None: ...


def reporter(quiet: bool) -> Reporter:
    """The reporter that fits this stderr."""
    if quiet:
        return Lines(shown=False)
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    return Bar() if live else Lines()


class Lines:
    """One plain line when a stage begins."""

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown
        self._stage = ""
        self._stream = sys.stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        if self._shown and stage != self._stage:
            print(printable(f"{stage}: {detail}" if detail else stage), file=self._stream, flush=True)
        self._stage = stage


class Bar:
    """A transient rich progress bar, one at a time, for the stage at work."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]:<10}"),
            BarColumn(24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
        )
        self._task: TaskID | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._progress)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        from rich.markup import escape

        if self._task is None:
            self._task = self._progress.add_task("", stage=stage)
        self._progress.update(
            self._task,
            stage=stage,
            description=escape(printable(detail)),
            completed=done,
            total=total or None,
            refresh=done == 0,
        )
