"""The strategies: ways to run a model low, an object each, known by name. Importing this needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import AuditorError

if TYPE_CHECKING:
    from .base import Strategy

SHIPPED = ("autocast", "cast")
"""Those that ship, each in the file of its name; what an audit plans unless it is told otherwise."""

_KNOWN: dict[str, Strategy] = {}


def names() -> tuple[str, ...]:
    """Every strategy there is: those that ship, and those registered."""
    return tuple(dict.fromkeys((*SHIPPED, *_KNOWN)))


def strategy_of(name: str) -> Strategy:
    """The strategy called `name`. Raises: KeyError for one that is not known."""
    if name not in _KNOWN and name in SHIPPED:
        _KNOWN[name] = importlib.import_module(f"{__name__}.{name}").STRATEGY
    return _KNOWN[name]


def register(strategy: Strategy) -> None:
    """Make a strategy known to `auditor.audit`, `--strategies`, plan.json and everything else, under its name.

    Raises: AuditorError(slug="bad-option") for a name that is taken, or that is no lower-case identifier.
    """
    name = strategy.name
    if not (name.isidentifier() and name.islower()):
        raise AuditorError(f"a strategy's name is a lower-case identifier, not {name!r}", slug="bad-option")
    if name in names():
        raise AuditorError(f"there is a strategy {name!r} already: give yours another name", slug="bad-option")
    _KNOWN[name] = strategy


@contextmanager
def registered(strategy: Strategy) -> Iterator[None]:
    """A strategy that is known for the body alone."""
    register(strategy)
    try:
        yield
    finally:
        del _KNOWN[strategy.name]
