"""Want of memory on the pretend GPU: a limit, or one allocation that finds none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from tests.pretend_gpu.memory import ALLOCATOR


@contextmanager
def limited(size: float) -> Iterator[None]:
    """The first GPU has so many bytes beside those in use."""
    gc.collect()
    ALLOCATOR.limit = ALLOCATOR.used[0] + int(size)
    try:
        yield
    finally:
        ALLOCATOR.limit = None


@contextmanager
def failing(at: int) -> Iterator[None]:
    """The allocation of that number, counted from here, finds no memory; those before and after it do."""
    ALLOCATOR.failing = ALLOCATOR.taken + at
    try:
        yield
    finally:
        ALLOCATOR.failing = None


@contextmanager
def counted(found: list[int]) -> Iterator[None]:
    """Adds how many allocations the body makes, and the most bytes that it holds at a time."""
    gc.collect()
    before, taken = ALLOCATOR.used[0], ALLOCATOR.taken
    ALLOCATOR.peak = list(ALLOCATOR.used)
    yield
    found += [ALLOCATOR.taken - taken, ALLOCATOR.peak[0] - before]
