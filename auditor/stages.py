"""The clock of an audit: which stage it is in, for how long, and what the progress callback hears of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .records import Progress


@dataclass
class Stages:
    """`with stages(name, detail, total):` runs one stage. seconds: {stage: how long it took}."""

    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)
    _current: str = ""
    _done: int = 0
    _total: int = 0

    @contextmanager
    def __call__(self, stage: str, detail: str, total: int = 0, *, wanted: bool = True) -> Iterator[None]:
        """wanted: whether this audit has that stage; nothing is said or timed otherwise."""
        if not wanted:
            yield
            return
        self._current, self._done, self._total = stage, 0, total
        self._say(detail)
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start

    def tick(self, detail: str) -> None:
        """One step of the stage is done."""
        self._done += 1
        self._say(detail)

    def _say(self, detail: str) -> None:
        if self.progress is not None:
            self.progress(self._current, detail, min(self._done, self._total) if self._total else 0, self._total)
