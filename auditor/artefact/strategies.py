"""Strategies by name; a strategy defines how a model runs in low precision. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..numerics.formats import label
from ..records.plan import Plan

if TYPE_CHECKING:
    from .base import Strategy

SHIPPED = ("autocast", "cast")
"""Strategies that patch a live model; an audit plans them by default."""

GRAPHS = ("graph",)
"""Strategies whose plans are exported programs; an audit makes such plans only on request."""

STRATEGIES = (*SHIPPED, *GRAPHS)


def strategy_of(name: str) -> Strategy:
    """Return the strategy called `name`. Raises: KeyError for an unknown name."""
    from .shipped import BY_NAME  # imports torch

    return BY_NAME[name]


def plan_title(plan: Plan) -> str:
    """A plan's display name: `FP16 under autocast`."""
    return f"{label(plan.format)} {strategy_of(plan.strategy).title}"
