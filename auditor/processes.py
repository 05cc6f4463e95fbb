"""Child processes: time limits, signals and exit codes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
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

LISTEN = 0.2
"""Seconds to wait for a message of a process before checking whether it has ended."""

SOON, LAST = 0.4, 0.3
"""Seconds that the process of an interrupted command has to clean up, and further seconds until all of it has ended."""

MOST_FILES = 65_536
"""Number of file descriptors that a process is assumed to have at most."""

PARENT = "AUDITOR_PARENT"
"""Environment variable with the number of the process that started a command, if the command must end with it."""

INTERRUPTIONS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


_interrupted = False
_children: set[int] = set()
"""Forked processes that `supervise` waits for."""


def is_interrupted() -> bool:
    """Whether a signal has interrupted this process: an exception that follows may be a consequence."""
    return _interrupted


def open_streams() -> None:
    """Open the standard streams that the caller has closed, as `>&-` does, on the null device."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - for the whole process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def end_with(parent: int) -> None:
    """Let the system kill this process as soon as its parent process, of this number, has ended, even by SIGKILL. Where
    the system cannot, a thread looks for it."""
    if _set_death_signal(signal.SIGKILL):
        if os.getppid() != parent:  # it had ended before
            os.kill(os.getpid(), signal.SIGKILL)
    elif hasattr(signal, "SIGKILL"):
        threading.Thread(target=_wait_for_end_of, args=(parent,), name="auditor-parent", daemon=True).start()


def outlive_parent() -> None:
    """Undo `end_with` in the thread that called it, for a process that cleans up after its parent and then ends."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> bool:
    """Ask Linux to send this process a signal when its parent ends, 0 for none; return whether that worked."""
    if not sys.platform.startswith("linux"):
        return False
    from ctypes import CDLL

    pr_set_pdeathsig = 1  # of sys/prctl.h
    return int(CDLL(None).prctl(pr_set_pdeathsig, int(number))) == 0


def _wait_for_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LAST)
    os.kill(os.getpid(), signal.SIGKILL)


def _start_watchdog(pipe: int) -> None:
    """Start a watchdog: a process that ends this one once the process that reads from `pipe` has ended. It needs no
    interpreter lock of this process, which native code may hold for seconds."""
    watched = os.getpid()
    its_end, own_end = os.pipe()  # the system closes `own_end` when this process ends
    between = os.fork()
    if between == 0:
        if os.fork() == 0:  # a grandchild, for which user code that waits for its own children does not wait
            os.close(own_end)
            _watch(watched, its_end, pipe)
        os._exit(0)
    os.close(its_end)
    os.waitpid(between, 0)


def _watch(watched: int, its_end: int, pipe: int) -> NoReturn:
    """In the watchdog: wait until this process's parent or the reader of the pipe has ended. If the reader ended, send
    the watched process SIGTERM, so that it cleans up, and SIGKILL after LAST seconds."""
    try:
        ignore_signals()
        first, last = sorted((its_end, pipe))
        for low, high in ((0, first), (first + 1, last), (last + 1, MOST_FILES)):
            os.closerange(low, high)
        ends = select.poll()
        for descriptor in (its_end, pipe):
            ends.register(descriptor, 0)  # with mask 0, `poll` reports only that the other side was closed
        if its_end not in dict(ends.poll()):
            os.kill(watched, signal.SIGTERM)
            ends.unregister(pipe)
            if not ends.poll(1000 * LAST):
                os.kill(watched, signal.SIGKILL)
    finally:
        os._exit(0)


def end_with_caller() -> None:
    """End with the process that started this command, if that process has asked for it in the environment."""
    if parent := os.environ.pop(PARENT, ""):
        end_with(int(parent))


def stop_at_once(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    """Kill the forked processes and end this one, as interrupted."""
    for child in _children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP: nothing may stop a cleanup, or change the exit code of a finished command."""
    if is_interrupted() and hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)


def unwind_on_signals() -> None:
    """Make the first SIGINT, SIGTERM or SIGHUP raise KeyboardInterrupt, so that the process can clean up.

    Another signal ends this process at once, and so does the end of a second: code may have caught the exception. A
    forked process ignores further signals, since its parent process ends it.
    """
    own = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _interrupted
        _interrupted = True
        ignore_signals()
        if os.getpid() == own:
            for number in INTERRUPTIONS:
                signal.signal(number, stop_at_once)
            if hasattr(signal, "setitimer"):
                signal.signal(signal.SIGALRM, stop_at_once)
                signal.setitimer(signal.ITIMER_REAL, SOON + LAST)
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


def supervise(
    run: Callable[..., Any],
    timeout: float | None = None,
    hear: Callable[[str], object] = str,
    cleans_up: bool = True,
) -> Any:
    """Run `run(tell)` in a forked process and return its result: an exit code, or any value except text. `tell(stage)`
    is a heartbeat; `tell("")` only checks whether the parent process still exists.

    hear: called with each stage. timeout: seconds without a heartbeat before the child is stopped. cleans_up: whether
    the child cleans up when the parent process ends; otherwise the system kills it, which needs no watchdog. Raises:
    AuditorError(slug="timed-out" | "process-ended"); KeyboardInterrupt, if either process is interrupted.
    """
    here, there = Pipe(duplex=False)
    if sys.stderr is not None:
        sys.stderr.flush()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        here.close()
        _children.clear()
        if cleans_up:
            _start_watchdog(there.fileno())
        else:
            end_with(parent)
        _run_child(run, there)
    _children.add(child)
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
            try:
                while here.poll(0 if has_ended() else LISTEN):
                    if not isinstance(said := here.recv(), str):
                        wait_until(has_ended, GRACE)
                        if said == 130:
                            raise KeyboardInterrupt
                        return said
                    if said:
                        where, since = f" (at: {said})", time.monotonic()
                        hear(said)
            except (EOFError, OSError):  # the child ends, and says no more
                wait_until(has_ended, LISTEN)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not has_ended():
                os.kill(child, number)
                wait_until(has_ended, SOON if is_interrupted() else GRACE)
        _children.discard(child)
    (code,) = ended
    why = "native code (outside Python) crashed"
    if code >= 0:
        why = (
            "the model's code ended it, or a library did, for example because the process was out of memory; "
            "the output above has the details. Let your code raise an exception instead"
        )
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
