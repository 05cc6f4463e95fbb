"""Memory of large tensors goes back to the system as soon as nothing holds it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MMAP_THRESHOLD, _USUAL = -3, 32 << 20
"""What glibc's mallopt calls the size from which memory comes from the system by itself, and where that ends up usually:
freeing such memory raises it, and smaller pieces then stay in a heap that grows around what is still held."""

LEAST = 4 << 20
"""Bytes below which it would cost more than it helps: every page would be a fault again and again."""


@contextmanager
def freeing(size: int) -> Iterator[None]:
    """In the body that goes for what has at least `size` bytes, or LEAST; where the C library cannot be told, nothing happens."""
    told = _mallopt()
    if told is None:
        yield
        return
    told(_MMAP_THRESHOLD, max(size, LEAST))
    try:
        yield
    finally:
        told(_MMAP_THRESHOLD, _USUAL)


def _mallopt() -> Any:
    """glibc's; None elsewhere."""
    return getattr(ctypes.CDLL(None), "mallopt", None)
