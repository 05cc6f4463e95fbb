"""The choices for a plan over single operations: proposed by minimum cuts, run as the graph that the plan would be."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .cut import Network
from .operations import Table
from .trial import Refused, Trial

STEPS = 24
"""Halvings of the range of multipliers, in which lies the last one whose prediction is within what is allowed."""


@dataclass(frozen=True)
class Choice:
    """Which operations run low. price: predicted seconds."""

    low: frozenset[str]
    price: float
    predicted_error: float


class Operations:
    """Choices of operations that run low. table: what they are chosen from, with what turned out not to run low kept.

    log: {what was low: error of the run}, inf where it does not run.
    """

    def __init__(self, table: Table, trial: Trial) -> None:
        self.table, self._trial = table, trial
        self.network = Network(table)
        self.log: dict[frozenset[str], float] = {}
        self._rejected: set[frozenset[str]] = set()
        self.nothing = self._choice(frozenset())

    def error(self, point: Choice, enough: float = math.inf) -> float:
        """Error of the graph with a choice low, but for what raises; inf where that does not help. enough: see Trial.error."""
        while (low := self.without_refused(point).low) not in self.log:
            try:
                self.log[low] = self._trial.error(self.table, low, enough)
            except Refused as refused:
                if refused.name not in low:
                    self.log[low] = math.inf
                else:
                    self.table = without(self.table, refused)
                    self.network = Network(self.table)
        return math.inf if low in self._rejected else self.log[low]

    def without_refused(self, point: Choice) -> Choice:
        """The choice but for what raised low."""
        low = point.low & self.table.may_be_low()
        return point if low == point.low else self._choice(low)

    def holding(self) -> list[Choice]:
        """Nothing is known before any run."""
        return []

    def reject(self, point: Choice) -> None:
        """Note that the artefact of a choice did not hold."""
        self._rejected.add(point.low)

    def proposed(self, allowed: float) -> Choice:
        """The cheapest choice that is predicted to have an error of at most `allowed`: a cut, and of what the next cut lowers as
        well as much as is, that first which saves most for its error."""
        fails, holds = self._bracketed(allowed)
        operations = self.table.operations
        pending = sorted(
            fails - holds,
            key=lambda name: (-_worth(operations[name].high - operations[name].low, operations[name].error), name),
        )
        best = self._choice(holds)
        first, last = 0, len(pending)
        while first < last:
            middle = (first + last + 1) // 2
            point = self._choice(holds | frozenset(pending[:middle]))
            if point.predicted_error <= allowed:
                first = middle
                best = min(best, point, key=lambda each: each.price)
            else:
                last = middle - 1
        return best

    def _bracketed(self, allowed: float) -> tuple[frozenset[str], frozenset[str]]:
        """Neighbouring cuts: the one predicted to break what is allowed, and the one predicted to hold it."""
        least, most = self.network.multipliers()
        fails = self.network.low(least)
        if self._choice(fails).predicted_error <= allowed:
            return fails, fails
        holds = self.nothing.low
        for _ in range(STEPS):
            if least >= most or fails == holds:
                break
            middle = math.sqrt(least * most)
            found = self.network.low(middle)
            if self._choice(found).predicted_error <= allowed:
                most, holds = middle, found
            else:
                least, fails = middle, found
        return fails, holds

    def _choice(self, low: frozenset[str]) -> Choice:
        price = self.network.price(low)
        return Choice(low, price.seconds, math.sqrt(price.square))


def without(table: Table, refused: Refused) -> Table:
    """The table with the operation that raised in FP32."""
    kept = replace(table.operations[refused.name], kept=f"it does not run low: {refused}"[:200], refused=True)
    return replace(table, operations={**table.operations, refused.name: kept})


def _worth(saved: float, error: float) -> float:
    return saved / max(error, 1e-30)
