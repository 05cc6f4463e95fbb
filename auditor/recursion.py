"""Room for calls to nest: what a model needs nearly all of is a little less than its audit needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENOUGH = 3_000
"""A module's call is three calls of Python's by itself, and more while it is watched, patched and run; the stack of a thread
has room for so many that go through C++."""


@contextmanager
def deep() -> Iterator[None]:
    """In the body calls nest deeper than Python allows by itself; the limit is then as it was, whatever the body set."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, ENOUGH))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
