"""Memory that nothing holds any more goes back to the system, and does not wait in a heap until it fits again."""

from __future__ import annotations

import ctypes
import math
import sys

from .limit import resident

GROWN = 0.2
"""Share by which a process may grow before it looks for memory to give back: a page that is needed again is a fault."""


def give_back() -> None:
    """Hand back what lies free between what is held; nothing where the C library cannot be told."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class Trimming:
    """Called now and then, gives memory back once this process has grown by a share since it last did, whatever it grew by."""

    def __init__(self) -> None:
        self._size = float(resident()) if sys.platform == "linux" else math.inf

    def __call__(self) -> None:
        """Nothing while the process is about as large as it was."""
        if self._size < math.inf and resident() > (1 + GROWN) * self._size:
            give_back()
            self._size = float(resident())
