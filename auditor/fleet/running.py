"""The audits of a fleet on this machine: so many at once, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ..processes import HERE, Process, how_ended
from .outcome import Outcome, asked_of
from .targets import Target

GRACE = 5.0
"""Seconds that an audit has to clean up once it is told to end."""

CRASHED = "explain process-ended"
"""In what an audit says whose model took the process down."""


@dataclass(frozen=True)
class Task:
    """An audit that is to be made. directory: where its files go. limit: seconds for it. retries: how often it is tried again
    where a signal ended it."""

    target: Target
    directory: Path
    limit: float | None = None
    retries: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def run_all(tasks: Sequence[Task], jobs: int, done: Callable[[Task, Outcome], None]) -> None:
    """Make all audits, `jobs` at a time; `done` hears of each as it ends.

    Whatever ends this, the audits at work are ended first, and count as not made.
    """
    over = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        waiting: dict[Future[Outcome], Task] = {pool.submit(run, task, over.is_set): task for task in tasks}
        try:
            while waiting:
                ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    done(waiting.pop(future), future.result())
        except BaseException:
            over.set()
            for future in waiting:
                future.cancel()
            raise


def run(task: Task, unwanted: Callable[[], bool] = lambda: False) -> Outcome:
    """Make an audit. unwanted: whether it is to be given up; it is asked all the time."""
    start, tries = time.monotonic(), 0
    while True:
        tries += 1
        code, said, crashed = _tried(task, unwanted)
        if not crashed or tries > task.retries or unwanted():
            break
    taken = round(time.monotonic() - start, 2)
    return Outcome(asked=asked_of(task.target), code=code, said=said, seconds=taken, tries=tries)


def command_of(task: Task) -> list[str]:
    """What makes the audit."""
    return [sys.executable, "-m", "auditor", *task.target.words, "--out", str(task.directory.absolute()), "--quiet"]


def _tried(task: Task, unwanted: Callable[[], bool]) -> tuple[int, str, bool]:
    """Exit code, the line that says why there is no audit, and whether a signal is why, which may not come again."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), HERE])
    environment = {**os.environ, **task.environment, "PYTHONPATH": path}
    try:
        process = Process(command_of(task), cwd=task.target.folder, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        return 2, f"the process could not be started: {error}", False
    try:
        if not process.ends_within(task.limit, unwanted):
            return 2, f"it took longer than {task.limit:g} seconds", False
    finally:
        process.end(GRACE)
    if (code := process.returncode) < 0:
        return code, f"the process {how_ended(code)}", True
    lines = process.last_words()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = (errors or lines or [f"it {how_ended(code)} and no word"])[-1][:500]
    return code, said if code > 1 else "", code > 1 and any(CRASHED in line for line in lines)
