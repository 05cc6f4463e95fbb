"""A command that runs the user's code, watched from outside: however that ends the process, it ends in one line."""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ..errors import AuditorError
from ..folder import swept

GRACE = 10.0
"""Seconds that the command has for what it does last: to clean up after a signal, to end after it is done."""

FORWARDED: dict[int, int] = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
if hasattr(signal, "SIGHUP"):
    FORWARDED[signal.SIGHUP] = signal.SIGTERM

STILL, TICK = 1.0, 0.5
"""Seconds after which a live line that the command does not draw is moved from here, and between two such moves: while a
library is loaded, no thread of the command runs."""

AGAIN = 0.1
"""Seconds after which progress in one stage is told again: each time both processes wake up, and a graph has thousands of nodes."""

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
"""What the first cell of a live line goes through."""

_tell: int | None = None
"""Where the watched process tells what it is at."""

_told: tuple[str, float] = "", -AGAIN
"""The stage that was told of last, and when."""


def watched(run: Callable[[], int], timeout: float | None) -> int:
    """`run()` in a process of its own; its exit code, which is 130 after Ctrl-C.

    timeout: seconds after which a command that tells of no progress is ended. Where the system cannot copy a process,
    `run()` is called here, unwatched.
    Raises: AuditorError(slug="timed-out" | "process-ended"), in the process that watches.
    """
    if not hasattr(os, "fork"):
        return run()
    there, held = os.pipe()  # ends for the one process when the other is gone
    news, tell = os.pipe()
    sys.stderr.flush()
    with _later():
        child = os.fork()
        if child == 0:
            os.close(held)
            os.close(news)
            _obey(there, tell)
    if child == 0:
        code = run()
        _send(f"done {code}")
        sys.exit(code)
    os.close(there)
    os.close(tell)
    return _Watch(child, news, timeout).code()


def at(stage: str) -> None:
    """Tell whoever watches that there is progress, and in what; of one stage now and then alone."""
    global _told
    before, when = _told
    if stage != before or time.monotonic() - when >= AGAIN:
        _told = stage, time.monotonic()
        _send(f"at {stage}")


def drawn(live: bool) -> None:
    """Tell whoever watches that a line of progress was drawn, and whether it stays to be drawn again."""
    _send(f"drawn {int(live)}")


def writes_into(directory: Path) -> None:
    """Tell whoever watches where unfinished files may lie."""
    _send(f"in {directory.absolute()}")


def _send(line: str) -> None:
    if _tell is not None:
        with suppress(OSError):
            os.write(_tell, line.replace("\n", " ")[:400].encode(errors="surrogateescape") + b"\n")


@contextmanager
def _later() -> Iterator[None]:
    """Signals that come during the body are heard after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _obey(there: int, tell: int) -> None:
    """Be the one that is watched: end when the other is gone, and of the first Ctrl-C."""
    global _tell
    _tell = tell
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)

    def follow() -> None:
        os.read(there, 1)  # nothing is ever written there
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _interrupted(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not stop the cleaning up
    raise KeyboardInterrupt


class _Watch:
    """One process, from its beginning to its end."""

    def __init__(self, child: int, news: int, timeout: float | None) -> None:
        self._child, self._news, self._timeout = child, news, timeout
        self._heard = b""
        self._stage = ""
        self._folders = [Path(tempfile.gettempdir())]
        self._done: int | None = None
        self._signal: int | None = None
        self._until = self._patience()
        self._drawn: float | None = None
        self._frame = 0

    def code(self) -> int:
        """Its exit code, once it has ended. Raises: see `watched`."""
        status = self._ended()
        for folder in self._folders:
            with suppress(OSError):
                swept(folder, self._child)
        if self._done is not None:
            return self._done
        if self._signal == signal.SIGINT:
            print("interrupted", file=sys.stderr)
            return 130
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)
            os.kill(os.getpid(), self._signal)
        raise self._ending(status)

    def _ended(self) -> int:
        woken, wake = os.pipe()
        for end in (woken, wake, self._news):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        while True:
            self._listen()
            ended, status = os.waitpid(self._child, os.WNOHANG)
            if ended:
                self._listen()
                signal.set_wakeup_fd(-1)
                return status
            wait = None if self._until is None else self._until - time.monotonic()
            if wait is not None and wait <= 0:
                self._give_up()
                continue
            still = self._moved()
            wait = still if wait is None else wait if still is None else min(wait, still)
            ready, _, _ = select.select([self._news, woken] if not self._gone else [woken], [], [], wait)
            if woken in ready:
                for number in os.read(woken, 64):
                    self._pass_on(number)

    def _moved(self) -> float | None:
        """Moves a live line that stands still; seconds until it is to be moved, None where there is none."""
        if self._drawn is None or self._gone:
            return None
        left = self._drawn + STILL - time.monotonic()
        if left > 0:
            return left
        self._frame = (self._frame + 1) % len(FRAMES)
        with suppress(OSError, UnicodeError):  # a terminal that takes none of this still has the line
            print(end=f"\r{FRAMES[self._frame]}", file=sys.stderr, flush=True)
        self._drawn = time.monotonic() - STILL + TICK
        return TICK

    _gone = False
    """Whether nothing more can be told."""

    _late = False
    """Whether it was ended for taking too long."""

    def _listen(self) -> None:
        """Read what was told."""
        while not self._gone:
            try:
                told = os.read(self._news, 4096)
            except BlockingIOError:
                return
            self._gone = not told
            *lines, self._heard = (self._heard + told).split(b"\n")
            for line in lines:
                self._note(*line.decode(errors="surrogateescape").partition(" ")[::2])

    def _note(self, what: str, value: str) -> None:
        if what == "drawn":  # which is no progress
            self._drawn = time.monotonic() if value == "1" else None
            return
        if what == "at":
            self._stage = value
        elif what == "in":
            self._folders.append(Path(value))
        elif what == "done":
            self._done = int(value)
        if self._signal is None and not self._late:
            self._until = self._patience() if self._done is None else time.monotonic() + GRACE

    def _patience(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _pass_on(self, number: int) -> None:
        """A signal that came here. A second one, unless it is the first once more, ends the waiting."""
        if number not in FORWARDED:
            return
        if self._signal is None:
            self._until = time.monotonic() + GRACE
        elif self._until is not None and self._until - time.monotonic() < GRACE - 1:
            self._until = time.monotonic()
        if self._signal is None:
            self._signal = number
            os.kill(self._child, FORWARDED[number])

    def _give_up(self) -> None:
        self._late = self._signal is None and self._done is None
        os.kill(self._child, signal.SIGKILL)
        self._until = None

    def _ending(self, status: int) -> AuditorError:
        """How it ended, without a word of its own."""
        where = f" (at: {self._stage})" if self._stage else ""
        if self._late:
            return AuditorError(
                f"no progress within {self._timeout:g} seconds{where}: give more with --timeout, or mend what never ends",
                slug="timed-out",
            )
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return AuditorError(
                f"the model's own code ended the process with exit code {code}{where}: nothing was written; have it "
                "raise instead",
                slug="process-ended",
            )
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        why = "the system does that when memory runs out" if name == "SIGKILL" else "code outside of Python crashed"
        return AuditorError(f"the process was ended by {name}{where}, and nothing was written: {why}", "process-ended")
