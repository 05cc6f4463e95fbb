"""A limit to what is resident: mapped files are let go of as soon as this process holds nearly as much as it may."""

from __future__ import annotations

import mmap
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import AuditorError
from .arena import Arena
from .freeing import freeing
from .spilling import Spilling

PAGE = mmap.PAGESIZE
NEARLY = 0.75
"""Share of the limit from which mapped files are let go of: a moment passes between two looks."""

STEP = 1 / 32
"""Share of the limit that must have become resident since they were last let go of."""

LOOK, OFTEN = 0.004, 0.001
"""Seconds between two looks in the midst of an operation, and between those after operations at least."""

SMALL, LARGE, SHARES = 1 << 16, 1 << 20, 1 << 12
"""Bytes from which a tensor is kept in a file: one of so many shares of the limit, within these."""

ROOM = 64 << 20
"""Bytes beside what a process with torch holds in any case without which nothing can be done."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_STATM = Path("/proc/self/statm")

_now: list[Limit] = []


class Limit:
    """Holds this process to some bytes of resident memory, as far as what is resident can be let go of.

    arena: where large tensors lie. peak: the most that was seen to be resident.
    """

    def __init__(self, size: int, arena: Arena | None = None) -> None:
        """Raises: AuditorError(slug="memory-too-small") where this process alone holds as much."""
        self.size, self.arena = size, arena or Arena()
        self.peak = resident()
        self._after, self._looked = 0, 0.0
        self._ended = threading.Event()
        least = self.peak + ROOM
        if size < least:
            raise too_small(size, least)

    @property
    def large(self) -> int:
        """Bytes from which a tensor is kept in a file."""
        return min(max(self.size // SHARES, SMALL), LARGE)

    def ease(self) -> None:
        """Let go of mapped files where nearly as much is resident as may be."""
        held = resident()
        self.peak = max(self.peak, held)
        if held > NEARLY * self.size and held - self._after > STEP * self.size:
            self.let_go()

    def looked(self) -> None:
        """The same, unless that was done a moment ago."""
        if (at := time.monotonic()) - self._looked > OFTEN:
            self._looked = at
            self.ease()

    def let_go(self) -> None:
        """Let go of mapped files now."""
        self.arena.let_go()
        self._after = resident()

    def watch(self) -> None:
        """Look again and again, until it ends."""
        while not self._ended.wait(LOOK):
            self.ease()

    def end(self) -> None:
        """No more looks."""
        self._ended.set()


@contextmanager
def limited(size: int | None) -> Iterator[Limit | None]:
    """In the body no more than `size` bytes are resident, as far as tensors that operations make can see to that.

    None: as much as it takes. Raises: AuditorError(slug="memory-too-small" | "no-paging").
    """
    if size is None:
        yield None
        return
    if not _STATM.exists():
        raise AuditorError(
            "this system does not say how much memory a process holds (/proc/self/statm): leave --memory out",
            "no-paging",
        )
    limit = Limit(size)
    thread = threading.Thread(target=limit.watch, name="auditor-memory", daemon=True)
    _now.append(limit)
    thread.start()
    try:
        with freeing(limit.large), Spilling(limit.arena, limit.large, limit.looked):
            yield limit
    finally:
        limit.end()
        thread.join()
        _now.remove(limit)


def now() -> Limit | None:
    """The limit that holds, if any."""
    return _now[-1] if _now else None


def resident() -> int:
    """Bytes of this process in memory: its own, and those of files that it has mapped."""
    return int(_STATM.read_bytes().split()[1]) * PAGE


def size_of(text: object) -> int:
    """Bytes, as in 4GB, 512MiB, 1.5g or 4000000000. Raises: AuditorError(slug="bad-option")."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size <= 0:
        raise AuditorError(f"memory is a size such as 4GB or 512MiB, not {text}", slug="bad-option")
    return size


def words(size: float) -> str:
    """A size as it may be given again: 4GB, 1.5GB, 650MB; the last place is rounded up."""
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    tenths = -int(-size * 10 // unit) if name == "GB" else -int(-size // unit) * 10
    return f"{tenths / 10:g}{name}"


def too_small(size: int, least: float) -> AuditorError:
    """What is said where the limit is below the least that works."""
    return AuditorError(
        f"--memory {words(size)} is too little for this audit: give {words(least)} or more", slug="memory-too-small"
    )
