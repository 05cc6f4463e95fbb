"""From the cuts of a graph to one choice: the fastest that holds the budget when it is run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .cut import Network
from .operations import Table
from .trial import Refused, Trial

STEPS = 24
"""Halvings of the range of multipliers, in which lies the last one whose prediction is within the budget."""

ROUNDS = 6
"""Times the search is begun again for less error, where a run of what it found is beyond the budget."""

BETWEEN = 5
"""Runs between a choice that holds and the next one on the curve, which does not."""

PROMISING = 2.0
"""How many times the budget everything low may be predicted to take and is run all the same."""

NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """Which operations run low. table: the one it was chosen from, with what turned out not to run low kept."""

    table: Table
    low: frozenset[str]


def search(table: Table, trial: Trial | None, budget: float) -> Choice:
    """The fastest choice within the budget. trial: None where nothing is to be run: the prediction decides then."""
    while True:
        try:
            return Choice(table, _searched(Network(table), table, trial, budget))
        except Refused as refused:
            if refused.name not in table.may_be_low():
                return Choice(table, NONE)
            table = without(table, refused)


def without(table: Table, refused: Refused) -> Table:
    """The table with the operation that raised in FP32."""
    kept = replace(table.operations[refused.name], kept=f"it does not run low: {refused}"[:200], refused=True)
    return replace(table, operations={**table.operations, refused.name: kept})


def _searched(network: Network, table: Table, trial: Trial | None, budget: float) -> frozenset[str]:
    least, most = network.multipliers()
    whole = network.low(least)
    predicted = math.sqrt(network.price(whole).square)
    if trial is None and predicted <= budget:
        return whole
    if trial is not None and predicted <= PROMISING * budget and trial.error(table, whole, budget) <= budget:
        return whole
    goal = budget
    for _ in range(ROUNDS):
        fails, holds = _bracketed(network, least, most, goal)
        if trial is None or not holds:
            return holds
        error = trial.error(table, holds, budget)
        if error <= budget:
            return _between(network, table, trial, fails, holds, budget)
        goal *= max(0.1, min(0.5, budget / error)) if math.isfinite(error) else 0.1
    return NONE


def _bracketed(network: Network, least: float, most: float, goal: float) -> tuple[frozenset[str], frozenset[str]]:
    """Neighbours on the curve: what is predicted to break the goal, and what is predicted to hold it."""
    fails, holds = network.low(least), NONE
    for _ in range(STEPS):
        if least >= most or fails == holds:
            break
        middle = math.sqrt(least * most)
        found = network.low(middle)
        if math.sqrt(network.price(found).square) <= goal:
            most, holds = middle, found
        else:
            least, fails = middle, found
    return fails, holds


def _between(
    network: Network, table: Table, trial: Trial, fails: frozenset[str], holds: frozenset[str], budget: float
) -> frozenset[str]:
    """The most of what is low in the one and not in the other, those first that save most for their error, that holds."""
    operations = table.operations
    pending = sorted(
        fails - holds,
        key=lambda name: (-_worth(operations[name].high - operations[name].low, operations[name].error), name),
    )
    lowest, highest, best = 0, len(pending) + 1, holds
    for _ in range(BETWEEN):
        middle = (lowest + highest) // 2
        if middle == lowest:
            break
        tried = holds | frozenset(pending[:middle])
        if trial.error(table, tried, budget) <= budget:
            lowest = middle
            best = tried if network.price(tried).seconds < network.price(best).seconds else best
        else:
            highest = middle
    return best


def _worth(saved: float, error: float) -> float:
    return saved / max(error, 1e-30)
