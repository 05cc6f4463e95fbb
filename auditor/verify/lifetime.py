"""The verification process and the one that started it: neither outlives the other with anything left behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..processes import HERE, Process

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from auditor.verify.worker import main
main()
"""
"""`python -m` would look for modules in the working directory first, and run the package as `__main__`."""

_standby: Process | None = None


def start() -> Process:
    """Run worker.py where this process lives: in its working directory, with its `sys.path`, its environment and the flags
    of its interpreter. Raises: OSError."""
    global _standby
    process, _standby = _standby, None
    if process is not None and process.poll() is None:
        return process
    path = [str(Path(folder).absolute()) for folder in sys.path]
    words = json.dumps([*path, *([] if HERE in path else [HERE])])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return Process([sys.executable, *flags, "-c", _BOOT, words], stdin=subprocess.PIPE)


@contextlib.contextmanager
def standby() -> Iterator[None]:
    """In the body there is a process for the first `start()`, which imports what it needs while this one works."""
    global _standby
    with contextlib.suppress(OSError):
        _standby = start()
    try:
        yield
    finally:
        process, _standby = _standby, None
        if process is not None:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, and that group, unless it has ended by itself."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # a line that it did not live to read
            process.stdin.close()


def hand(process: subprocess.Popen[bytes], job: Any) -> None:
    """Give a process something for `jobs` there; one that has ended is left in peace."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()


def ended(process: subprocess.Popen[bytes], grace: float) -> bool:
    """Tell a process that nothing more comes, and give it so many seconds to end by itself; whether it did."""
    hand(process, None)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        return False
    return True


def jobs() -> Iterator[Any]:
    """What this process is handed, one after the other: first settings, among them `scratch`.

    This process ends when whoever holds the other end of its standard input is gone, and the folder that the settings call
    `scratch` with it. Standard input is empty for everybody else.
    """
    pipe, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    handed: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def watch() -> None:
        scratch: list[str] = []
        with os.fdopen(pipe, encoding="utf-8") as lines:
            for line in lines:
                job = json.loads(line)
                scratch = scratch or [job["scratch"]]
                handed.put(job)
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return iter(handed.get, None)
