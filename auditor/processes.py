"""Processes that this one starts and answers for: how long they may take, which signals they hear, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from .errors import AuditorError
from .folder import sweep

if TYPE_CHECKING:
    from .progress.shown import Display

HERE = str(Path(__file__).resolve().parents[1])
"""What has to be on `sys.path` for a plain checkout to be found without being installed."""

LOOK, GRACE = 0.05, 10.0
"""Seconds between two looks at a process, and those that it has to clean up once it is to end."""

PIPE = 1 << 20
"""More bytes than a pipe holds: one read has all that was written to it by a process that has ended."""

FORWARDED: dict[int, int] = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
if hasattr(signal, "SIGHUP"):
    FORWARDED[signal.SIGHUP] = signal.SIGTERM


def how_ended(code: int) -> str:
    """`was killed by SIGSEGV`, `ended with exit code 3`."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


class Process(subprocess.Popen[bytes]):
    """A process that leads a group of its own. messages: what it says on stderr."""

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes there for as long as it lives
        super().__init__(
            command, stdout=subprocess.DEVNULL, stderr=self.messages, start_new_session=True, **{"stdin": None, **how}
        )

    def last_words(self) -> list[str]:
        """The lines at the end of what it said, blank ones left out."""
        self.messages.seek(max(self.messages.seek(0, os.SEEK_END) - 65536, 0))
        return [line for line in self.messages.read().decode(errors="replace").splitlines() if line.strip()]

    def ends_within(self, limit: float | None, unwanted: Callable[[], bool]) -> bool:
        """Wait for its end, or until it is not wanted any more; False where it takes longer than `limit` seconds."""
        until = None if limit is None else time.monotonic() + limit
        while self.poll() is None and not unwanted():
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(LOOK)
        return True

    def end(self, grace: float = 0.0) -> None:
        """Nothing that it started is left; it has so many seconds to clean up."""
        if grace and self.poll() is None:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.wait(grace)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.kill()
        self.wait()


class _Termination(BaseException):
    """SIGTERM came."""


@contextmanager
def unwound() -> Iterator[None]:
    """SIGTERM ends the body as Ctrl-C does, so that it can clean up; then it ends the process, as it would have.

    Only in the main thread, and where nobody else has a handler for it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except _Termination:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not stop the cleaning up
    raise _Termination


def supervise(run: Callable[[ToWatcher], int], shown: Display, timeout: float | None) -> int:
    """`run(progress)` in a copy of this process, which is watched from here; its exit code, which is 130 after Ctrl-C.

    What it tells of its progress is shown here, where nothing that it does can stop that. timeout: seconds after which
    one that tells of no progress is ended. Raises: AuditorError(slug="timed-out" | "process-ended").
    """
    here, there = Pipe()  # each process ends when the other's end is closed
    said, stderr = os.pipe() if shown.live else (-1, -1)
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # what comes meanwhile is heard by both
    child = os.fork()
    if child == 0:
        here.close()
        told = ToWatcher(there)
        if shown.live:
            os.dup2(stderr, 1)  # where standard output was set aside, the other leads there too
            os.dup2(stderr, 2)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if child == 0:
        code = run(told)
        told.send(code)
        sys.exit(code)
    there.close()
    if shown.live:
        os.close(stderr)
    return _Watch(child, here, said, shown, timeout).code()


class ToWatcher:
    """The progress of a process that is watched, told to whoever watches it; it ends when that one is gone."""

    def __init__(self, watcher: Connection) -> None:
        self._watcher, self._heard = watcher, threading.Event()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)

        def follow() -> None:
            with suppress(EOFError, OSError):
                while watcher.recv():
                    self._heard.set()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE)
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        self.send((stage, detail[:200], done, total))

    def close(self, failed: bool = False) -> None:
        """Nothing is shown any more when this returns."""
        self.send(None)
        self._heard.wait(GRACE)

    def send(self, news: tuple[str, str, int, int] | int | None) -> None:
        """What there is to show, that nothing is any more, or the exit code."""
        with suppress(OSError):
            self._watcher.send(news)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not stop the cleaning up
    raise KeyboardInterrupt


class _Watch:
    """One process, from its beginning to its end."""

    def __init__(self, child: int, line: Connection, said: int, shown: Display, timeout: float | None) -> None:
        self._child, self._line, self._shown, self._timeout = child, line, shown, timeout
        self._open: list[Any] = [line, *([said] if shown.live else [])]
        self._stage = ""
        self._done: int | None = None
        self._signal: int | None = None
        self._late = False
        self._until = self._patience()

    def code(self) -> int:
        """Its exit code, once it has ended. Raises: see `supervised`."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        status = self._wait()
        self._shown.close()
        sweep(Path(tempfile.gettempdir()), self._child)
        if self._done is not None:
            return self._done
        if self._signal == signal.SIGINT:
            print("interrupted", file=sys.stderr)
            return 130
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)
            os.kill(os.getpid(), self._signal)
        raise self._ending(status)

    def _wait(self) -> int:
        while True:
            ended, status = os.waitpid(self._child, os.WNOHANG)
            self._listen(0 if ended else LOOK)
            if ended:
                return status
            self._shown.tick()
            if self._until is not None and time.monotonic() >= self._until:
                self._late = self._signal is None and self._done is None
                os.kill(self._child, signal.SIGKILL)
                self._until = None

    def _listen(self, seconds: float) -> None:
        """Hear what was told, and pass on what was said."""
        for end in wait(self._open, seconds):
            if isinstance(end, int):
                if said := os.read(end, PIPE):
                    self._shown.write(said)
                    continue
            else:
                with suppress(EOFError, OSError):
                    while self._line.poll():
                        self._note(self._line.recv())
                    continue
            self._open.remove(end)

    def _note(self, news: tuple[str, str, int, int] | int | None) -> None:
        if isinstance(news, int):
            self._done = news
        elif news is None:
            self._shown.close()
            with suppress(OSError):  # it may be gone
                self._line.send(True)
        else:
            self._stage = news[0]
            self._shown(*news)
        if self._signal is None and not self._late:
            self._until = self._patience() if self._done is None else time.monotonic() + GRACE

    def _patience(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """A signal that came here. A second one, unless it is the first once more, ends the waiting."""
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._until = number, now + GRACE
            with suppress(ProcessLookupError):
                os.kill(self._child, FORWARDED[number])
        elif self._until is not None and self._until - now < GRACE - 1:
            self._until = now

    def _ending(self, status: int) -> AuditorError:
        """How it ended, without a word of its own."""
        where = f" (at: {self._stage})" if self._stage else ""
        if self._late:
            return AuditorError(
                f"no progress within {self._timeout:g} seconds{where}: raise --timeout, or fix the code that hangs",
                slug="timed-out",
            )
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return AuditorError(
                f"the model's own code ended the process with exit code {code}{where}: nothing was written; have it "
                "raise instead",
                slug="process-ended",
            )
        killed = -code == signal.SIGKILL
        why = "the system does that when memory runs out" if killed else "code outside of Python crashed"
        return AuditorError(f"the process {how_ended(code)}{where}, and nothing was written: {why}", "process-ended")
