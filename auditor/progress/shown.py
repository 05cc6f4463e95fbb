"""Progress as it is shown: a live line on a terminal or in a notebook, lines in a log, or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..report.words import percent, printable
from .forecast import Forecast, duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY = 10.0
"""Seconds between the lines of a log."""

REDRAWN = 0.5
"""Seconds between two pictures of a live line; it moves also where one operation takes minutes."""

DETAIL = 28
"""Width of what a stage says it is at."""


class Reporter(Protocol):
    """A `records.Progress` that opens and closes."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, *error: object) -> None: ...
    def __call__(self, stage: str, detail: str, done: int, total: int) -> None: ...


def reporter(quiet: bool = False, training: bool = False, drawn: Callable[[bool], None] | None = None) -> Reporter:
    """The reporter that fits this stderr. training: whether the audit is one of a training step.

    drawn: hears of every time that a live line is drawn, and with False that it is gone.
    """
    if quiet:
        return Silent()
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    return Bar(training, drawn) if live else Lines(training)


class Silent:
    """Says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        return None


class Clock:
    """Calls a function every so many seconds, in a thread of its own, from `start` to `stop`."""

    def __init__(self, every: float, act: Callable[[], None]) -> None:
        self._every, self._act = every, act
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the first call is one interval away."""
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="auditor-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; the thread is gone when this returns."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self._act()


class Lines:
    """One plain line when a stage begins, and one every ten seconds while it lasts."""

    def __init__(self, training: bool = False, every: float = EVERY) -> None:
        self._forecast = Forecast(training)
        self._stream = sys.stderr
        self._clock = Clock(every, self._still)

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._clock.stop()

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        begins = stage != self._forecast.stage
        self._forecast.heard(stage, detail, done, total, time.monotonic())
        if begins:
            self._say(f"{stage}: {detail}" if detail else stage)

    def _still(self) -> None:
        if self._forecast.stage:
            self._say(f"  {self._forecast.stage}, {said(self._forecast, time.monotonic())}")

    def _say(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


def said(forecast: Forecast, now: float) -> str:
    """`34% done, 12 s, about 25 s left`, without what is not known; `more than` where a stage is late."""
    left = forecast.left(now)
    spent = duration(forecast.elapsed(now))
    if forecast.over:
        return f"100% done, {spent}"
    share = forecast.share(now)
    done = f"{percent(share)} done, {spent}" if share else spent
    if left is None or left < 1:
        return done
    return f"{done}, {'more than' if forecast.open(now) else 'about'} {duration(left)} left"


class Live:
    """What is drawn again and again while an audit runs. A child says how, and opens and closes."""

    def __init__(self, training: bool = False) -> None:
        self._forecast = Forecast(training)
        self._lock = threading.Lock()
        self._clock = Clock(REDRAWN, self._draw)

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        begins = stage != self._forecast.stage
        self._forecast.heard(stage, detail, done, total, time.monotonic())
        if begins:
            self._draw()

    def _draw(self) -> None:
        raise NotImplementedError


class Bar(Live):
    """A transient line on a terminal: the stage, the share of the whole that is done, the time, and when it ends."""

    def __init__(self, training: bool = False, drawn: Callable[[bool], None] | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        super().__init__(training)
        self._progress: Progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]}"),
            BarColumn(16),
            TextColumn("{task.fields[said]}"),
            TextColumn("{task.description}", style="dim"),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            auto_refresh=False,
        )
        self._task: TaskID | None = None
        self._told = drawn or (lambda live: None)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._progress)
        _live.append(sys.stderr)
        self._stack.callback(_live.pop)
        self._clock.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._clock.stop()
        if kind is None:
            self._forecast.finished()
            self._draw()
        self._told(False)
        self._stack.close()

    def _draw(self) -> None:
        from rich.markup import escape

        if not self._forecast.stage:
            return
        with self._lock:
            if self._task is None:
                self._task = self._progress.add_task("", total=1.0, stage="", said="")
            now, (place, places) = time.monotonic(), self._forecast.place
            share = self._forecast.share(now)
            known = share > 0
            self._progress.update(
                self._task,
                stage=f"{escape(self._forecast.stage)} {place}/{places}",
                said=said(self._forecast, now),
                description=escape(printable(self._forecast.detail)[:DETAIL]),
                completed=share,
                total=1.0 if known else None,
                refresh=True,
            )
        self._told(True)


_live: list[Any] = []
"""What stands for stderr while a line is drawn."""


def _in_a_copy() -> None:
    """A copy of the process writes to stderr itself: the thread that may have held the line's lock is not in it."""
    if _live and sys.stderr is _live[-1]:
        sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_copy)
