"""A process that is set aside before any of the user's code runs, with the libraries imported that a verification needs."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

_POLL = 0.01
"""Seconds between two looks whether it has ended."""

_FILES = 1 << 12
"""Open files that a copy of this process closes."""


class Spare:
    """The part of `subprocess.Popen` that is asked of a process which was copied, and not started."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(pipe, "wb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises: subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a spare process", timeout or 0.0)
            time.sleep(_POLL)
        return code

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


_kept: Spare | None = None


@contextlib.contextmanager
def kept(device: str = "auto") -> Iterator[None]:
    """In the body there is a copy of this process for `taken`, as it is now; what nobody took ends with the body.

    Nothing where the system cannot copy processes safely, or where a GPU or other ranks may be in use, which a copy could
    not talk to.
    """
    global _kept
    _kept = _copied() if _is_safe(device) else None
    try:
        yield
    finally:
        spare, _kept = _kept, None
        if spare is not None:
            spare.stdin.close()
            spare.wait()


def taken(folder: Path, environment: dict[str, str]) -> Spare | None:
    """The copy, as `python -m auditor.verify.worker FOLDER` in FOLDER/cwd; None where there is none, or none any more."""
    global _kept
    spare, _kept = _kept, None
    if spare is None or spare.poll() is not None:
        return None
    with contextlib.suppress(OSError):
        for line in (str(folder), environment.get("PYTHONPATH", "")):
            spare.stdin.write(os.fsencode(line) + b"\n")
        spare.stdin.flush()
        return spare
    return None


def _is_safe(device: str) -> bool:
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    main = threading.current_thread() is threading.main_thread()
    return sys.platform == "linux" and main and alone and (device == "cpu" or torch.version.cuda is None)


def _copied() -> Spare | None:
    importlib.import_module(f"{__package__}.worker")
    there, here = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those there are only wait
        try:
            pid = os.fork()
        except OSError:
            os.close(there)
            os.close(here)
            return None
    if pid == 0:
        _be_spare(there)
    os.close(there)
    return Spare(pid, here)


def _be_spare(pipe: int) -> NoReturn:
    """Wait for a folder to work in, and then be what a process would be that was started for it."""
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, end in enumerate((pipe, nothing, nothing)):
            os.dup2(end, number)
        os.closerange(3, _FILES)
        _as_started()
        folder, paths = _line(), _line()
        if folder is not None and paths is not None:
            _enter(Path(folder), paths)
            importlib.import_module(f"{__package__}.worker").main(Path(folder))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _as_started() -> None:
    """Signals and streams as Python finds them when it starts."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False, errors="backslashreplace")  # type: ignore[misc]


def _line() -> str | None:
    """The next line of the pipe, no byte of what follows; None where whoever holds it has gone."""
    read = b""
    while (byte := os.read(0, 1)) != b"\n":
        if not byte:
            return None
        read += byte
    return os.fsdecode(read)


def _enter(folder: Path, paths: str) -> None:
    os.chdir(folder / "cwd")
    stderr = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    os.close(stderr)
    os.environ["PYTHONPATH"] = paths
    own = [] if sys.flags.safe_path else [str(folder / "cwd")]
    sys.path[:] = [*own, *(path for path in sys.path[len(own) :])]
    sys.path += [path for path in paths.split(os.pathsep) if path and path not in sys.path]
    importlib.invalidate_caches()
    sys.argv = [str(Path(__file__).with_name("worker.py")), str(folder)]
