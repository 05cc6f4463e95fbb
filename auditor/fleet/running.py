"""One audit of a fleet: a process of its own, which is watched and ended from here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .outcome import Outcome, asked_of
from .targets import Target

GRACE = 5.0
"""Seconds that an audit has to clean up once it is told to end."""

CRASHED = "explain process-ended"
"""In what an audit says whose model took the process down."""

LOOK = 0.05
"""Seconds between two looks at a process."""


@dataclass(frozen=True)
class Task:
    """An audit that is to be made. directory: where its files go. limit: seconds for it. retries: how often it is tried again
    where a signal ended it."""

    target: Target
    directory: Path
    limit: float | None = None
    retries: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def run(task: Task, ended: Callable[[], bool] = lambda: False) -> Outcome:
    """Make an audit. ended: whether it is to be given up; it is asked all the time."""
    start, tries = time.monotonic(), 0
    while True:
        tries += 1
        code, said, crashed = _tried(task, ended)
        if not crashed or tries > task.retries or ended():
            break
    taken = round(time.monotonic() - start, 2)
    return Outcome(asked=asked_of(task.target), code=code, said=said, seconds=taken, tries=tries)


def command_of(task: Task) -> list[str]:
    """What makes the audit."""
    return [sys.executable, "-m", "auditor", *task.target.words, "--out", str(task.directory.absolute()), "--quiet"]


def _tried(task: Task, ended: Callable[[], bool]) -> tuple[int, str, bool]:
    """Exit code, the line that says why there is no audit, and whether a signal is why, which may not come again."""
    here = str(Path(__file__).resolve().parents[2])  # a plain checkout is found without being installed
    paths = [*(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p), here]
    with tempfile.TemporaryFile() as words:
        try:
            process = subprocess.Popen(
                command_of(task),
                cwd=task.target.folder,
                env={**os.environ, **task.environment, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                start_new_session=True,
            )
        except OSError as error:
            return 2, f"the process could not be started: {error}", False
        late = _waited(process, task.limit, ended)
        words.seek(max(words.seek(0, os.SEEK_END) - 65536, 0))
        told = words.read().decode(errors="replace")
    if late:
        return 2, f"it took longer than {task.limit:g} seconds", False
    code = process.returncode
    if code < 0:
        return code, f"the process was killed by {_signal(-code)}", True
    return code, _line(told, code) if code > 1 else "", CRASHED in told and code > 1


def _waited(process: subprocess.Popen[bytes], limit: float | None, ended: Callable[[], bool]) -> bool:
    """Wait for the end, which is made where it takes too long or is not wanted any more; whether it took too long."""
    until = None if limit is None else time.monotonic() + limit
    late = False
    try:
        while process.poll() is None:
            late = until is not None and time.monotonic() > until
            if late or ended():
                break
            time.sleep(LOOK)
    finally:
        _end(process)
    return late


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing that the audit started is left."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(how)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _line(told: str, code: int) -> str:
    """What an audit said last of why it ended."""
    lines = [line for line in told.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"it ended with exit code {code} and no word"])[-1][:500]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
