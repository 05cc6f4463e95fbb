"""How an audit gets by with less memory of a GPU: what it does in parts, or leaves to the host, while a body runs.

Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WHOLE = 1 << 24
"""Entries of a tensor that are compared at a time on a GPU: few enough to need little memory, enough to keep it busy."""


@dataclass(frozen=True)
class Sparing:
    """run: entries compared at a time on a GPU. singly: one format is measured after the other. host: reference values
    and errors wait in the host's memory. taken: what was done for want of memory, in words.
    """

    run: int = WHOLE
    singly: bool = False
    host: bool = False
    taken: tuple[str, ...] = ()


_current = [Sparing()]


def now() -> Sparing:
    """How sparing the audit is that runs; also asked by the threads of autograd."""
    return _current[-1]


@contextmanager
def sparing(how: Sparing) -> Iterator[None]:
    """The body gets by so."""
    _current.append(how)
    try:
        yield
    finally:
        _current.pop()
