"""Files that others than the arena have mapped, such as a library the checkpoint it reads, taken out of memory."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

MADV_PAGEOUT = 21
LARGE = 8 << 20
"""Bytes of a mapping from which it is worth a call."""

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r([-w])-[ps] \S+ \S+ ([1-9]\d*) +(/.*)")
_LIBRARY = re.compile(r"\.so(\.\d+)*$")


def page_out(arena: Path) -> None:
    """Take large mapped files out of memory, but for libraries and nameless files of the arena's folder.

    What was written to private mappings stays, and so does everything where the system cannot do it.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    for start, size in _mappings(arena):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(MADV_PAGEOUT))


def _mappings(arena: Path) -> Iterator[tuple[int, int]]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        start, end, name = int(match[1], 16), int(match[2], 16), match[5]
        nameless = name.endswith(" (deleted)") and Path(name).parent == arena.resolve()
        if end - start >= LARGE and not _LIBRARY.search(name) and not nameless:
            yield start, end - start
