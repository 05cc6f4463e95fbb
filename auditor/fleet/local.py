"""A fleet on this machine: so many audits at once, each in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from .outcome import Outcome
from .running import Task, run

Done = Callable[[Task, Outcome], None]


def run_all(tasks: Sequence[Task], jobs: int, done: Done) -> None:
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
