"""Progress as it is shown: a live line on a terminal or in a notebook, lines in a log, or nothing."""

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

STAGES = ("capture", "measure", "classify", "baseline", "plan", "follow")
"""Those of every audit."""

WIDTH, TURNS = 16, "|/-\\"
"""Of the bar, in characters; what stands before it, in turn."""

WIPED = "\r\x1b[2K"
"""What takes the line of a terminal away."""


class Display:
    """How far an audit is: in which stage of how many, and for how long it runs. By itself it shows nothing."""

    every = 10.0
    """Seconds after which it is shown again though nothing was told."""

    def __init__(self) -> None:
        self.stage, self.detail = "", ""
        self.tell: Callable[[str], None] = lambda stage: None  # who else hears of every call, and of ticks as ""
        self._stages, self._within, self._began, self._at = list(STAGES), 0.0, 0.0, 0.0

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        """One call of the progress callback. A stage that not every audit has is one more."""
        self.tell(stage)
        begins = stage != self.stage
        if not self.stage:
            self._began = time.monotonic()
        if stage not in self._stages:
            self._stages.insert(self._stages.index(self.stage) + 1 if self.stage else 0, stage)
        self.stage, self.detail, self._within = stage, detail, done / total if total else 0.0
        if begins:
            self._at = time.monotonic()
            self.show(begins)

    def tick(self) -> None:
        """To be called several times a second."""
        self.tell("")
        if self.stage and time.monotonic() - self._at >= self.every:
            self._at = time.monotonic()
            self.show(begins=False)

    def show(self, begins: bool) -> None:
        """Show it, now. begins: whether the stage does."""

    def close(self, failed: bool = False) -> None:
        """Nothing is shown any more."""
        self.stage = ""

    @property
    def share(self) -> float:
        """What is done, of all stages, each as long as the others."""
        return (self._stages.index(self.stage) + self._within) / len(self._stages)

    @property
    def elapsed(self) -> str:
        """Time since the first stage began."""
        return duration(time.monotonic() - self._began)

    def place(self) -> str:
        """`measure 3/9`."""
        return f"{self.stage} {self._stages.index(self.stage) + 1}/{len(self._stages)}"

    def summary(self) -> str:
        """`34% done, 12 s`."""
        return f"{int(100 * self.share)}% done, {self.elapsed}"


def duration(seconds: float) -> str:
    """`8 s`, `1:05 min`, `1:02 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Lines(Display):
    """One plain line when a stage begins, and one every ten seconds while it lasts."""

    def show(self, begins: bool) -> None:
        began = f"{self.stage}: {self.detail}" if self.detail else self.stage
        print(printable(began if begins else f"  {self.place()}, {self.summary()}"), file=sys.stderr, flush=True)


class Bar(Display):
    """A line on a terminal that is wiped at the end: the stage, the share of the stages that is done, and the time.

    It takes the place of stderr, so that what others write there stands above it.
    """

    every = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._turns, self._drawn, self._stderr = 0, False, sys.stderr
        self._cells = "━─" if "utf" in (sys.stderr.encoding or "").lower() else "#-"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)

    def write(self, said: str) -> int:
        """Put what somebody says on stderr."""
        if self._drawn:
            self._wipe()
        return self._stderr.write(said)

    def show(self, begins: bool) -> None:
        if sys.stderr is not self:
            self._stderr, sys.stderr = sys.stderr, self  # type: ignore[assignment]
        self._turns += 1
        full = round(self.share * WIDTH)
        bar = self._cells[0] * full + self._cells[1] * (WIDTH - full)
        line = f"{TURNS[self._turns % 4]} {self.place()} {bar} {self.summary()} {printable(self.detail)}"
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
    """A line below the cell of a notebook that changes; it says at the end how long the audit took."""

    every = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._id, self._open = uuid.uuid4().hex, False

    def show(self, begins: bool) -> None:
        said = f"{self.place()}, {self.summary()}: {printable(self.detail)}"
        self._display(said.removesuffix(": "), f'<progress max="1" value="{self.share:.3f}"></progress> ')

    def close(self, failed: bool = False) -> None:
        if self.stage:
            self._display(f"ended in {self.stage} after {self.elapsed}" if failed else f"audited in {self.elapsed}")
        super().close()

    def _display(self, text: str, bar: str = "") -> None:
        display: Any = import_module("IPython.display").display
        data = {"text/plain": text, "text/html": f"{bar}<code>{escape(text)}</code>"}
        display(data, raw=True, display_id=self._id, update=self._open)
        self._open = True


def reporter(quiet: bool = False) -> Display:
    """The one that fits this notebook, or this stderr."""
    if quiet:
        return Display()
    if in_notebook():
        return Cell()
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    return Bar() if live else Lines()


@contextmanager
def ticking(shown: Display) -> Iterator[Display]:
    """In the body it is shown again and again, from a thread; it is closed after that."""
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
