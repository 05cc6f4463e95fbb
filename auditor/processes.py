"""Child processes: time limits, signals and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .errors import AuditorError

HERE = str(Path(__file__).resolve().parents[1])
"""The folder that `sys.path` needs to import a checkout that is not installed."""

LOOK, GRACE = 0.02, 10.0
"""Seconds between two checks of a process, and seconds that an ending process has to clean up."""

NO_THREAD = 127
"""glibc's exit code when it cannot allocate thread-local data."""

INTERRUPTIONS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP: nothing may stop a cleanup, or change the exit code of a finished command."""
    for number in INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)


def unwind_on_signals() -> None:
    """Make the first SIGINT, SIGTERM or SIGHUP raise KeyboardInterrupt, so that the process can clean up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        sys.unraisablehook = lambda unraised: None  # for a signal that arrives while Python runs a callback
        raise KeyboardInterrupt

    for number in INTERRUPTIONS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def how_ended(code: int) -> str:
    """An exit code in words: `was killed by SIGSEGV`, `ended with exit code 3`."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def wait_until(over: Callable[[], bool], limit: float | None, progress: Callable[[], object] = int) -> bool:
    """Wait until `over()` is true; return False earlier if `progress()` does not change for `limit` seconds."""
    known, since = progress(), time.monotonic()
    while not over():
        time.sleep(LOOK)
        if (now := progress()) != known:
            known, since = now, time.monotonic()
        if limit is not None and time.monotonic() - since > limit:
            return False
    return True


class Process(subprocess.Popen[bytes]):
    """A child process in a process group of its own. messages: a file with the process's stderr."""

    def __init__(self, command: Sequence[str], stdin: int = subprocess.DEVNULL, **how: Any) -> None:
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes there for as long as it lives
        how |= {"stdin": stdin, "stdout": subprocess.DEVNULL, "stderr": self.messages}
        super().__init__(command, start_new_session=True, **how)

    def last_words(self) -> list[str]:
        """Nonblank lines in the last 64 kB of the process's stderr."""
        self.messages.seek(max(self.messages.seek(0, os.SEEK_END) - 65536, 0))
        return [line for line in self.messages.read().decode(errors="replace").splitlines() if line.strip()]

    def end(self, grace: float = 0.0) -> None:
        """Stop the process and everything that it started, after `grace` seconds to clean up."""
        if grace and self.poll() is None:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.wait(grace)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.kill()
        self.communicate()  # which closes the pipes


def supervise(run: Callable[..., Any], timeout: float | None = None, hear: Callable[[str], object] = str) -> Any:
    """Run `run(tell)` in a forked process and return its result: an exit code, or any value except text. `tell(stage)`
    is a heartbeat; `tell("")` only checks whether the parent process still exists.

    hear: called with each stage. timeout: seconds without a heartbeat before the child is stopped. Raises:
    AuditorError(slug="timed-out" | "process-ended"); KeyboardInterrupt, if either process is interrupted.
    """
    here, there = Pipe(duplex=False)
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        here.close()
        _run_child(run, there)
    there.close()
    stage, since, code = "", time.monotonic(), None

    def has_ended() -> bool:
        nonlocal code
        if code is None:
            number, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if number else None
        return code is not None

    try:
        while timeout is None or time.monotonic() - since <= timeout:
            over = wait_until(has_ended, LOOK)
            with suppress(EOFError, OSError):
                while here.poll():
                    if not isinstance(said := here.recv(), str):
                        wait_until(has_ended, GRACE)
                        if said == 130:
                            raise KeyboardInterrupt
                        return said
                    if said:
                        stage, since = said, time.monotonic()
                        hear(said)
            if over:
                break
    finally:
        if not has_ended():
            os.kill(child, signal.SIGTERM)
            if not wait_until(has_ended, GRACE):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    raise _without_a_word(code if over else None, f" (at: {stage})" if stage else "", timeout)


def _run_child(run: Callable[..., Any], parent: Connection) -> NoReturn:
    """In the child process of `supervise`: run, send the result to the parent process, and end."""

    def tell(news: Any) -> None:
        try:
            parent.send(news)
        except OSError:  # the parent process has ended
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        done = run(tell)
    except KeyboardInterrupt:
        done = 130
    tell(done)
    sys.exit(done)


def _without_a_word(code: int | None, where: str, timeout: float | None) -> AuditorError:
    """The error for a child process that sent no result. code: its exit code; None after a timeout."""
    if code is None:
        return AuditorError(
            f"no progress within {timeout:g} seconds{where}: raise --timeout, or fix the code that hangs", "timed-out"
        )
    if code == NO_THREAD:
        why = "the C library ended the process, since no memory for a thread was left"
        return AuditorError(f"the process ran out of memory{where}: {why}", "out-of-memory")
    why = "native code (outside Python) crashed"
    if code >= 0:
        why = "the model's code ended the process (let it raise instead), or a library did, for a reason shown above"
    elif -code == signal.SIGKILL:
        why = "the system kills processes when memory runs out"
    return AuditorError(f"the process {how_ended(code)}{where}: {why}", "process-ended")
