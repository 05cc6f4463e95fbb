"""Room for calls to nest: what a model needs nearly all of is a little less than its audit needs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

MORE = 4
"""A module's call is three calls of Python's by itself, and more while it is watched, patched and run."""

ENOUGH, ENOUGH_IN_THREADS = 10_000, 3_000
STACK = 100 << 20
"""Bytes of stack that the first thread may grow to: some 10 KB for each of the calls, which those through C++ need."""

_raised: int | None = None


@contextmanager
def deep() -> Iterator[None]:
    """In the body calls nest deeper than the caller allows; the limit is then as it was, whatever the body set.

    Once in itself it changes nothing, unless a model has set a limit of its own in between. Endless recursion still ends
    in a RecursionError: where the stack cannot grow, the limit is raised less.
    """
    global _raised
    before, limit = _raised, sys.getrecursionlimit()
    if limit == before:
        yield
        return
    with ExitStack() as undone:
        most = max(ENOUGH, 2 * limit) if _grown(undone) else max(ENOUGH_IN_THREADS, limit)
        undone.callback(sys.setrecursionlimit, limit)
        _raised = min(MORE * limit, most)
        sys.setrecursionlimit(_raised)
        try:
            yield
        finally:
            _raised = before


def _grown(undone: ExitStack) -> bool:
    """Whether the stack of this thread may grow to STACK, until all is undone: that of the first one, where it may."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limits; the hard one may be less
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        if threading.current_thread() is threading.main_thread():
            if soft != resource.RLIM_INFINITY and soft < STACK:
                resource.setrlimit(resource.RLIMIT_STACK, (STACK, hard))
                undone.callback(resource.setrlimit, resource.RLIMIT_STACK, (soft, hard))
            return True
    return False
