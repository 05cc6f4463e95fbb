"""A limit to what is resident: mapped files are let go of as soon as this process holds nearly as much as it may."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import AuditorError
from ..raised import disk_is_full
from .arena import Arena
from .freeing import freeing
from .paging import page_out
from .spilling import Spilling

PAGE = mmap.PAGESIZE
NEARLY = 0.75
"""Share of the limit from which mapped files are let go of: a moment passes between two looks."""

STEP = 1 / 32
"""Share of the limit that must have become resident since they were last let go of."""

SELDOM = 0.25
"""Seconds between two times that files are paged out which others have mapped: they are read from the disk again."""

LOOK, OFTEN = 0.004, 0.001
"""Seconds between two looks in the midst of an operation, and between those after operations at least."""

OWN = 1 / 3
"""Share of what the limit leaves beside the libraries that results may take without lying in files: most are soon gone."""

SMALL, LARGE, SHARES = 1 << 16, 1 << 20, 1 << 12
"""Bytes from which a tensor is kept in a file: one of so many shares of the limit, within these."""

ROOM = 64 << 20
"""Bytes beside what a process with torch holds in any case without which nothing can be done."""

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
        self._after, self._looked, self._paged = 0, 0.0, 0.0
        self._began, self._own = unmapped(), 0.0
        self._ended = threading.Event()
        least = self.peak + ROOM
        if size < least:
            raise too_small(size, least)

    @property
    def large(self) -> int:
        """Bytes from which a tensor is kept in a file."""
        return min(max(self.size // SHARES, SMALL), LARGE)

    def loaded(self) -> None:
        """The model is there: what comes now may stay in memory while there is little of it."""
        self.let_go()
        self._began, self._own = unmapped(), OWN * max(self.size - resident(), 0)

    def need(self, size: int) -> None:
        """So many bytes are needed at once beside what is resident in any case.

        Raises: AuditorError(slug="memory-too-small") where the limit is below that.
        """
        self.let_go()
        least = resident() + ROOM + size
        if self.size < least:
            raise too_small(self.size, least)

    def stays(self, size: int) -> bool:
        """Whether so many bytes may stay in memory of their own."""
        return self._own > 0 and unmapped() - self._began + size < self._own

    def ease(self) -> None:
        """Let go of mapped files where nearly as much is resident as may be."""
        held = resident()
        self.peak, self._after = max(self.peak, held), min(self._after, held)  # the heap may have been trimmed since
        if held > NEARLY * self.size and held - self._after > STEP * self.size:
            self.let_go()

    def looked(self) -> None:
        """The same, unless that was done a moment ago."""
        if (at := time.monotonic()) - self._looked > OFTEN:
            self._looked = at
            self.ease()

    def let_go(self) -> None:
        """Let go of mapped files now; of those that others mapped, such as checkpoints, where that is not enough."""
        self.arena.let_go()
        if resident() > NEARLY * self.size and time.monotonic() - self._paged > SELDOM:
            page_out(self.arena.folder)
            self._paged = time.monotonic()
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

    None: as much as it takes. Raises: AuditorError(slug="memory-too-small" | "no-paging"), and
    DiskError where the body raised something else because of it.
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
        with freeing(limit.large), Spilling(limit.arena, limit.large, limit.stays, limit.looked):
            yield limit
    except Exception as error:
        if (full := disk_is_full(error)) is not None and full is not error:
            raise full from None
        raise
    finally:
        limit.end()
        thread.join()
        _now.remove(limit)


def now() -> Limit | None:
    """The limit that holds, if any."""
    return _now[-1] if _now else None


def within() -> tuple[str, ...]:
    """What is done to stay within the limit, in words; nothing where there is none."""
    limit = now()
    return () if limit is None else (f"large tensors in mapped files, to hold no more than {words(limit.size)}",)


def came_to() -> str | None:
    """What the limit came to so far, in words; None where there is none."""
    limit = now()
    if limit is None:
        return None
    limit.ease()
    written, peak = (f"{size / 1e9:.2f} GB" for size in (limit.arena.written, limit.peak))
    of = "more than" if limit.peak > limit.size else "of"
    most = f"{peak} in memory at most, {of} the {words(limit.size)} allowed"
    return f"{written} of large tensors written to mapped files; {most}"


def resident() -> int:
    """Bytes of this process in memory: its own, and those of files that it has mapped."""
    return int(_STATM.read_bytes().split()[1]) * PAGE


def unmapped() -> int:
    """Those that are of no file."""
    _, held, shared, *_ = _STATM.read_bytes().split()
    return (int(held) - int(shared)) * PAGE


def too_small(size: int, least: float) -> AuditorError:
    """What is said where the limit is below the least that works."""
    return AuditorError(
        f"--memory {words(size)} is too little for this audit: give {words(least)} or more", slug="memory-too-small"
    )


def words(size: float) -> str:
    """A size as it may be given again: 4GB, 1.5GB, 650MB; the last place is rounded up."""
    return f"{-int(-size * 10 // 10**9) / 10:g}GB" if size > 99 * 10**7 else f"{-int(-size // 10**7) * 10}MB"
