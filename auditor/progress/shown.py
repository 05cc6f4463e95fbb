"""Displays progress: a live line on a terminal or in a notebook, lines in a log, or nothing."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

from ..errors import printable

STAGES = (
    "load:target, generate:generate, FP32 score:evaluate, capture, measure, baseline, training:training, classify, plan, "
    "schemes:schemes, scores:evaluate, decode:generate, low-precision steps:training, follow, write:target"
).split(", ")
"""Stages of an audit, in order: `stage`, or `stage:setting` if the stage depends on a setting."""

WIDTH, TURNS = 16, "|/-\\"
"""Width of the progress bar in characters; the frames of the spinner beside the bar."""

WIPED = "\r\x1b[2K"
"""Escape sequence that erases the current terminal line."""


class Display:
    """The progress of an audit: current stage, number of stages, elapsed time. This base class displays nothing."""

    every = 10.0
    """Seconds between two refreshes during a stage."""

    def __init__(self, settings: object = None) -> None:
        self.stage, self.detail = "", ""
        # called with the stage of every report, and with "" for every tick
        self.tell: Callable[[str], object] = str
        stages = (stage.partition(":") for stage in getattr(settings, "stages", STAGES))
        self._stages = [stage for stage, _, setting in stages if not setting or getattr(settings, setting, None)]
        self.began, self._at = 0.0, 0.0
        self.share = 0.0  # completed share: every stage counts equally; an added stage does not lower the share

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        """The progress callback. A stage that the settings do not announce increases the number of stages."""
        self.tell(stage)
        begins = stage != self.stage
        if not self.stage:
            self.began = time.monotonic()
        if stage not in self._stages:
            self._stages.insert(self._stages.index(self.stage) + 1 if self.stage else 0, stage)
        self.stage, self.detail = stage, detail
        completed = self._stages.index(stage) + (done / total if total else 0.0)
        self.share = max(self.share, completed / len(self._stages))
        if begins:
            self._at = time.monotonic()
            self.show(begins)

    def tick(self) -> None:
        """Refresh the display if `every` seconds have passed; called several times a second."""
        self.tell("")
        if self.stage and time.monotonic() - self._at >= self.every:
            self._at = time.monotonic()
            self.show(begins=False)

    def show(self, begins: bool) -> None:
        """Display the progress now. begins: whether a stage starts."""

    def close(self, failed: bool = False) -> None:
        """End the display. failed: whether the audit raised an exception."""
        self.stage = ""

    @property
    def elapsed_seconds(self) -> str:
        """Time since the first stage began, as text: `12 s`, `1:05 min`."""
        return duration(time.monotonic() - self.began)

    def summary(self) -> str:
        """Stage, its number, the completed share of all stages, and the time: `measure (stage 3 of 9), in total 34% done after 12 s`."""
        place = f"{self.stage} (stage {self._stages.index(self.stage) + 1} of {len(self._stages)})"
        return f"{place}, in total {int(100 * self.share)}% done after {self.elapsed_seconds}"


def duration(seconds: float) -> str:
    """Format seconds: `8 s`, `1:05 min`, `1:02 h`."""
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{left:02} min" if minutes else f"{left} s"
    return f"{minutes // 60}:{minutes % 60:02} h"


class Lines(Display):
    """Prints a line when a stage begins, and every ten seconds during the stage."""

    def show(self, begins: bool) -> None:
        began = f"{self.stage}: {self.detail}" if self.detail else self.stage
        print(printable(began if begins else f"  {self.summary()}"), file=sys.stderr, flush=True)


class Bar(Display):
    """A terminal line with the stage, the completed share and the time; the line is erased at the end.

    The bar replaces `sys.stderr`, so that other output to stderr appears above the line.
    """

    every = 0.5

    def __init__(self, settings: object = None) -> None:
        super().__init__(settings)
        self._turns, self._drawn, self._stderr = 0, False, sys.stderr
        self._cells = "━─" if "utf" in (sys.stderr.encoding or "").lower() else "#-"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)

    def write(self, written: str) -> int:
        """Write text to stderr, above the progress line."""
        if self._drawn:
            self._wipe()
        return self._stderr.write(written)

    def show(self, begins: bool) -> None:
        if sys.stderr is not self:
            self._stderr, sys.stderr = sys.stderr, self  # type: ignore[assignment]
        self._turns += 1
        full = round(self.share * WIDTH)
        bar = self._cells[0] * full + self._cells[1] * (WIDTH - full)
        line = f"{TURNS[self._turns % 4]} {bar} {self.summary()} {printable(self.detail)}"
        print(end=WIPED + line[: shutil.get_terminal_size().columns - 1], file=self._stderr, flush=True)
        self._drawn = True

    def close(self, failed: bool = False) -> None:
        super().close()
        self._wipe()
        sys.stderr = self._stderr

    def _wipe(self) -> None:
        print(end=WIPED, file=self._stderr, flush=True)
        self._drawn = False


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    known = sys.modules.get("IPython")
    shell = known.get_ipython() if known is not None and hasattr(known, "get_ipython") else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class Cell(Display):
    """A progress line below a notebook cell; at the end it shows how long the audit took."""

    every = 0.5

    def __init__(self, settings: object = None) -> None:
        super().__init__(settings)
        self._id, self._open = uuid.uuid4().hex, False

    def show(self, begins: bool) -> None:
        line = f"{self.summary()}: {printable(self.detail)}"
        self._display(line.removesuffix(": "), f'<progress max="1" value="{self.share:.3f}"></progress> ')

    def close(self, failed: bool = False) -> None:
        if self.stage:
            how = f"ended in {self.stage} after" if failed else "audited in"
            self._display(f"{how} {self.elapsed_seconds}")
        super().close()

    def _display(self, text: str, bar: str = "") -> None:
        display: Any = import_module("IPython.display").display
        data = {"text/plain": text, "text/html": f"{bar}<code>{escape(text)}</code>"}
        display(data, raw=True, display_id=self._id, update=self._open)
        self._open = True


def reporter(quiet: bool = False, settings: object = None) -> Display:
    """The display for this process: notebook cell, terminal line or log lines; none if `quiet`. settings: the audit's
    settings."""
    if quiet or sys.stderr is None:
        return Display()
    if in_notebook():
        return Cell(settings)
    is_live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    return Bar(settings) if is_live else Lines(settings)


@contextmanager
def refresh_display(shown: Display) -> Iterator[Display]:
    """In the `with` block, a thread refreshes the display; then it is closed."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(min(shown.every / 4, 0.25)):
            shown.tick()

    thread = threading.Thread(target=run, name="auditor-progress", daemon=True)
    thread.start()
    failed = True
    try:
        yield shown
        failed = False
    finally:
        over.set()
        thread.join()
        shown.close(failed)
