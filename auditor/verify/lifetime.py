"""The verification process and the one that started it: neither outlives the other with anything left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


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


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, and that group, unless it has ended by itself."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def end_with_parent(scratch: Path) -> None:
    """Have this process end when whoever holds the other end of its standard input is gone, and `scratch` with it.

    Afterwards standard input is empty.
    """
    pipe, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        os.read(pipe, 1)  # nothing is ever written there
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
