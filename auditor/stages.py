"""Tracks the stages of an audit: current stage, durations, and calls of the progress callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .errors import AuditorError, caused_by, describe, device_failed, from_outside, out_of_memory

QUIET = 1.0
"""Minimum seconds between two heartbeats."""

_running: list[Stages] = []
"""Trackers of the stages that are running, the innermost last."""


@dataclass
class Stages:
    """`with stages(name, detail, total):` runs one stage. seconds: {stage: its duration}."""

    progress: Callable[[str, str, int, int], None] | bool | None
    seconds: dict[str, float] = field(default_factory=dict)
    _current: str = ""
    _detail: str = ""
    _done: int = 0
    _total: int = 0
    _told: float = 0.0

    @contextmanager
    def __call__(self, stage: str, detail: str, total: int = 0) -> Iterator[None]:
        """Run the body as one stage. Raises: AuditorError, as `explain` does."""
        self._current, self._done, self._total = stage, 0, total
        self.say(detail)
        start = time.perf_counter()
        _running.append(self)
        try:
            yield
        except Exception as error:
            explain(stage, error)
            raise
        finally:
            _running.pop()
        self.seconds[stage] = time.perf_counter() - start

    def say(self, detail: str, steps: int = 0) -> None:
        """Report progress. steps: number of steps completed since the last report."""
        self._done += steps
        self._detail = detail
        self._told = time.perf_counter()
        if callable(self.progress):
            done = min(self._done, self._total) if self._total else 0
            self.progress(self._current, detail, done, self._total)


def explain(stage: str, error: Exception) -> None:
    """Raise an AuditorError that explains an error of torch or the model; internal errors get the stage as a note."""
    if isinstance(error, AuditorError) or caused_by(error, TimeoutError):
        return
    message = describe(error)
    if out_of_memory(error):
        raise AuditorError(
            f"out of memory in the stage {stage!r} ({message}): give smaller inputs, use a machine with more memory or, if a GPU is full, --device cpu",
            slug="out-of-memory",
        ) from error
    if device_failed(error):
        raise AuditorError(
            f"the GPU failed in the stage {stage!r} ({message}) and is unusable for this process: audit "
            "with device=cpu, or run again with CUDA_LAUNCH_BLOCKING=1 to locate the failure",
            slug="device-failed",
        ) from error
    if from_outside(error):
        raise AuditorError(
            f"the model ran and was recorded, but in the stage {stage!r} an operation raised {message}. The operation may "
            "keep state between calls, or reject tensors that require gradients: --debug shows the operation",
            slug="operation-raises",
        ) from error
    if not hasattr(error, "__notes__"):
        error.add_note(f"in the stage {stage!r}")


def tick(detail: str) -> None:
    """Report one completed step of the current stage."""
    for stages in _running[-1:]:
        stages.say(detail, 1)


def beat(detail: str = "") -> None:
    """Send a heartbeat between two steps, at most once a second. detail: the current work in words, if any."""
    for stages in _running[-1:]:
        if time.perf_counter() - stages._told >= QUIET:
            stages.say(detail or stages._detail)
