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

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY = 10.0
"""Seconds between the lines of a log."""

REDRAWN = 0.5
"""Seconds between two pictures of a live line; it moves also where one operation takes minutes."""

DETAIL = 28
"""Width of what a stage says it is at."""

STAGES = ("capture", "measure", "classify", "baseline", "plan", "follow")
"""Those of every audit."""


class Reporter(Protocol):
    """A `records.Progress` that opens and closes."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, *error: object) -> None: ...
    def __call__(self, stage: str, detail: str, done: int, total: int) -> None: ...


def reporter(quiet: bool = False, drawn: Callable[[bool], None] | None = None) -> Reporter:
    """The reporter that fits this stderr.

    drawn: hears of every time that a live line is drawn, and with False that it is gone.
    """
    if quiet:
        return Silent()
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    return Bar(drawn) if live else Lines()


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


class Place:
    """How far an audit is: in which stage of how many, and for how long it runs."""

    def __init__(self) -> None:
        self.stage, self.detail = "", ""
        self._stages, self._within, self._began = list(STAGES), 0.0, time.monotonic()

    def heard(self, stage: str, detail: str, done: int, total: int) -> bool:
        """One call of the progress callback; whether a stage begins with it. One that not every audit has is one more."""
        begins = stage != self.stage
        if not self.stage:
            self._began = time.monotonic()
        if stage not in self._stages:
            self._stages.insert(self._stages.index(self.stage) + 1 if self.stage else 0, stage)
        self.stage, self.detail, self._within = stage, detail, done / total if total else 0.0
        return begins

    @property
    def share(self) -> float:
        """Of all stages, each as long as the others."""
        return (self._stages.index(self.stage) + self._within) / len(self._stages)

    @property
    def elapsed(self) -> str:
        """Time since the first stage began."""
        return duration(time.monotonic() - self._began)

    def number(self) -> str:
        """`measure 3/9`."""
        return f"{self.stage} {self._stages.index(self.stage) + 1}/{len(self._stages)}"

    def said(self) -> str:
        """`34% done, 12 s`."""
        return f"{percent(self.share)} done, {self.elapsed}"


def duration(seconds: float) -> str:
    """`8 s`, `1:05 min`, `1:02 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Lines:
    """One plain line when a stage begins, and one every ten seconds while it lasts."""

    def __init__(self, every: float = EVERY) -> None:
        self._place = Place()
        self._stream = sys.stderr
        self._clock = Clock(every, self._still)

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._clock.stop()

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        if self._place.heard(stage, detail, done, total):
            self._say(f"{stage}: {detail}" if detail else stage)

    def _still(self) -> None:
        if self._place.stage:
            self._say(f"  {self._place.number()}, {self._place.said()}")

    def _say(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


class Live:
    """What is drawn again and again while an audit runs. A child says how, and opens and closes."""

    def __init__(self) -> None:
        self._place = Place()
        self._lock = threading.Lock()
        self._clock = Clock(REDRAWN, self._draw)

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        if self._place.heard(stage, detail, done, total):
            self._draw()

    def _draw(self) -> None:
        raise NotImplementedError


class Bar(Live):
    """A transient line on a terminal: the stage, the share of the stages that is done, and the time."""

    def __init__(self, drawn: Callable[[bool], None] | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        super().__init__()
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
        if kind is None and self._place.stage:
            self._show(1.0, f"100% done, {self._place.elapsed}")
        self._told(False)
        self._stack.close()

    def _draw(self) -> None:
        if self._place.stage:
            self._show(self._place.share, self._place.said())

    def _show(self, share: float, said: str) -> None:
        from rich.markup import escape

        with self._lock:
            if self._task is None:
                self._task = self._progress.add_task("", total=1.0, stage="", said="")
            self._progress.update(
                self._task,
                stage=escape(self._place.number()),
                said=said,
                description=escape(printable(self._place.detail)[:DETAIL]),
                completed=share,
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
