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
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


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
        how |= {"stdout": subprocess.DEVNULL, "stderr": self.messages, "start_new_session": True}
        super().__init__(command, stdin=stdin, **how)

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
    if (child := os.fork()) == 0:
        here.close()
        _run_child(run, there)
    there.close()
    ended: list[int] = []  # the child's exit code, once it has ended
    where, since = "", time.monotonic()

    def has_ended() -> bool:
        if not ended and (state := os.waitpid(child, os.WNOHANG))[0]:
            ended.append(os.waitstatus_to_exitcode(state[1]))
        return bool(ended)

    try:
        while not ended:
            if timeout is not None and time.monotonic() - since > timeout:
                what = f"no progress within {timeout:g} seconds{where}"
                raise AuditorError(f"{what}: raise --timeout, or fix the code that hangs", "timed-out")
            wait_until(has_ended, LOOK)
            with suppress(EOFError, OSError):
                while here.poll():
                    if not isinstance(said := here.recv(), str):
                        wait_until(has_ended, GRACE)
                        if said == 130:
                            raise KeyboardInterrupt
                        return said
                    if said:
                        where, since = f" (at: {said})", time.monotonic()
                        hear(said)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not has_ended():
                os.kill(child, number)
                wait_until(has_ended, GRACE)
    (code,) = ended
    why = "native code (outside Python) crashed"
    if code >= 0:
        why = "the model's code ended it (let it raise instead), or a library did, for example out of memory: see above"
    elif -code == signal.SIGKILL:
        why = "the system kills processes when memory runs out"
    raise AuditorError(f"the process {how_ended(code)}{where}: {why}", "process-ended")


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
