"""Why operations of a graph stay FP32, each in one clause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..records import Kept
from .cut import Network
from .operations import Operation
from .search import Choice, Operations


def kept_of(space: Operations, choice: Choice, budget: float) -> tuple[Kept, ...]:
    """Every operation that reads FP32 values and does not run low, with the reason, from the log of what was run.

    budget: what the choice may take.
    """
    square = space.network.price(choice.low).square
    weighing = _Weighing(space.network, choice.low, square, budget, space.log)
    operations = space.table.operations.values()
    return tuple(
        Kept(each.name, each.op, *weighing.reason(each), each.captured)
        for each in operations
        if each.name not in choice.low
    )


@dataclass(frozen=True)
class _Weighing:
    """One choice; square: the squared error that is predicted of it."""

    network: Network
    low: frozenset[str]
    square: float
    budget: float
    runs: Mapping[frozenset[str], float]

    def reason(self, operation: Operation) -> tuple[str, str]:
        """Why an operation is FP32: in one word, and in a clause."""
        if operation.refused:
            return "refused", operation.kept
        if operation.kept:
            kind = operation.kept.partition(":")[0]
            return (kind if kind == "unsafe" else "untested"), operation.kept
        now = self.network.around(operation, self.low)
        then = self.network.around(operation, self.low | {operation.name})
        if then.seconds >= now.seconds:
            return "no-gain", "lowering it alone saves nothing: what it takes is no less than the casts around it"
        after = math.sqrt(max(self.square + then.square - now.square, 0.0))
        if after > self.budget:
            return (
                "budget",
                f"low as well, it takes the predicted error from {math.sqrt(self.square):.2g} to {after:.2g}",
            )
        return "budget", self._run(operation.name) or "no choice on the curve of cuts with it low holds the budget"

    def _run(self, name: str) -> str:
        """The smallest choice with it low that was run and did not hold."""
        broke = [low for low, error in self.runs.items() if name in low and not error <= self.budget]
        if not broke:
            return ""
        least = min(broke, key=lambda low: (len(low), sorted(low)))
        off = f"is off by {self.runs[least]:.2g}" if math.isfinite(self.runs[least]) else "gives what is not finite"
        others = len(least) - 1
        beside = f" and {others} other{'s' * (others != 1)}" if others else ""
        return f"run with it{beside} low, the graph {off}"
