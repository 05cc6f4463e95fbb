"""The registry of strategies by name; a strategy defines how a model runs in low precision. Needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import AuditorError
from ..numerics.formats import label
from ..records.plan import Plan

if TYPE_CHECKING:
    from .base import Strategy

SHIPPED = ("autocast", "cast")
"""Built-in strategies that an audit plans by default."""

GRAPHS = ("graph",)
"""Strategies whose plans are exported programs; an audit makes such plans only on request."""

_KNOWN: dict[str, Strategy] = {}


def names() -> tuple[str, ...]:
    """Names of all strategies, built-in and registered, that patch a live model."""
    return tuple(dict.fromkeys((*SHIPPED, *(name for name in _KNOWN if name not in GRAPHS))))


def all_strategies() -> tuple[str, ...]:
    """Names of all strategies, built-in and registered."""
    return (*names(), *GRAPHS)


def strategy_of(name: str) -> Strategy:
    """Return the strategy called `name`. Raises: KeyError for an unknown name."""
    if name not in _KNOWN and name in (*SHIPPED, *GRAPHS):
        from .shipped import STRATEGIES

        _KNOWN[name] = STRATEGIES[name]
    return _KNOWN[name]


def plan_title(plan: Plan) -> str:
    """A plan's display name: `FP16 under autocast`."""
    return f"{label(plan.format)} {strategy_of(plan.strategy).title}"


def register(strategy: Strategy) -> None:
    """Make a strategy available to `auditor.audit`, `--strategies` and plan.json, under its name.

    Raises: AuditorError(slug="bad-strategy") if name, title or runtime is missing, if the name is taken or not a
    lower-case identifier, or if the runtime's source cannot be read: `patched_model.py` contains a copy.
    """
    problem = _problem(strategy)
    if problem is not None:
        name = getattr(strategy, "name", type(strategy).__name__)
        raise AuditorError(f"the strategy {name!r} cannot be registered: {problem}", slug="bad-strategy")
    _KNOWN[strategy.name] = strategy


def _problem(strategy: Strategy) -> str | None:
    for wanted in ("name", "title"):
        if not isinstance(getattr(strategy, wanted, None), str):
            return f"its attribute `{wanted}` must be a string"
    if not isinstance(getattr(strategy, "runtime", None), type):
        return "its attribute `runtime` must be a class"
    if not (strategy.name.isidentifier() and strategy.name.islower()):
        return "a name must be a lower-case identifier, since plan names begin with it"
    if strategy.name in all_strategies():
        return "the name is already taken"
    try:
        inspect.getsource(strategy.runtime)
    except (OSError, TypeError):
        return "the source of its runtime cannot be read: define the class in a file"
    return None


@contextmanager
def temporary_strategy(strategy: Strategy) -> Iterator[None]:
    """Register a strategy within the `with` block only."""
    register(strategy)
    try:
        yield
    finally:
        del _KNOWN[strategy.name]
