"""The verification process and the one that started it: neither outlives the other with anything left behind."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from .spare import Spare

Process = subprocess.Popen[bytes] | Spare


class _Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def unwound() -> Iterator[None]:
    """SIGTERM ends the body as Ctrl-C does, so that it can clean up; then it ends the process, as it would have.

    Only in the main thread, and where nobody else has a handler for it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    ended = False
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except _Terminated:
        ended = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if ended:
        os.kill(os.getpid(), signal.SIGTERM)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the cleaning up
    raise _Terminated


def end(process: Process) -> None:
    """Kill a process that leads a group, and that group, unless it has ended by itself."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # a line that it did not live to read
            process.stdin.close()


def hand(process: Process, line: str) -> None:
    """Write a line for `end_with_parent` of a process to give; one that has ended is left in peace."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(os.fsencode(line) + b"\n")
        process.stdin.flush()


def ended(process: Process, grace: float) -> bool:
    """Tell a process that nothing more comes, and give it so many seconds to end by itself; whether it did."""
    hand(process, "")
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_with_parent(scratch: Path) -> Iterator[str]:
    """Have this process end when whoever holds the other end of its standard input is gone, and `scratch` with it.

    Gives the lines that come from there, up to an empty one. Standard input is empty for everybody else.
    """
    pipe, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def watch() -> None:
        begun = b""
        while told := os.read(pipe, 4096):
            *whole, begun = (begun + told).split(b"\n")
            for line in whole:
                lines.put(os.fsdecode(line))
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return iter(lines.get, "")
