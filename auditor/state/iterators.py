"""Iterators that a model keeps: where one stands cannot be set, but a copy made in time still stands there."""

from __future__ import annotations

import copy
import itertools
from typing import Any

_RANGES = (type(iter(range(0))), type(iter(range(2**70))))
_PLAIN = frozenset({itertools.count, type(iter([])), type(iter(())), *_RANGES})
"""Those that are copied without moving on; what they run over is shared with the copy."""


def as_it_is(value: Any) -> Any:
    """A copy of an iterator, which stays where it is; None for all else, and where Python copies none."""
    cls = type(value)
    if cls not in _PLAIN and cls is not itertools.cycle:
        return None
    try:
        return _again(value) if cls is itertools.cycle else copy.copy(value)
    except TypeError:
        return None


def moved_on(value: Any, kept: Any) -> bool:
    """Whether an iterator has gone further than its copy."""
    return bool(_place(value) != _place(kept))


def _again(value: Any) -> Any:
    """On its first way round a cycle goes on with an iterator that its copy would share."""
    make, (inner,), (seen, around) = value.__reduce__()
    found = make(copy.copy(inner))
    found.__setstate__((list(seen), around))
    return found


def _place(value: Any) -> Any:
    """Where it stands, in numbers: what it runs over need not know how to be compared."""
    _, given, *state = value.__reduce__()
    if type(value) is itertools.cycle:
        return _place(given[0]), len(state[0][0]), state[0][1]
    return (given, state) if type(value) in (itertools.count, *_RANGES) else state
