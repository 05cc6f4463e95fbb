"""Signs of life from inside a stage, for whoever shows how far an audit is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]

_listeners: list[Listener] = []


def beat(detail: str = "") -> None:
    """A step of a stage's work is done, or begins; detail: what it is, where that is worth a word."""
    if _listeners:
        _listeners[-1](detail)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener(detail)` hears of every beat in the body."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
