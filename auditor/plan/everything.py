"""Everything low, tried before anything is searched for: where that is safe, fast and holds, it is the plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..formats.table import runs
from ..records import Plan
from .choose import plain_plan, plain_will_do
from .plans import Tick, verify
from .workbench import Workbench

PROMISING = 1.5
"""How many times the budget everything low may be predicted to take and is tried all the same: a run costs little, and
predictions are that far off."""


def everything_low(bench: Workbench, strategies: Sequence[str], formats: Sequence[str], tick: Tick) -> dict[str, Plan]:
    """The plans with everything low, verified, of those strategies and formats in which that is worth a try."""
    problems = [bench.problem(strategy, fmt) for strategy in strategies for fmt in formats]
    plans = {
        problem.name: plain_plan(problem)
        for problem in problems
        if runs(problem.format) and plain_will_do(problem, PROMISING * bench.max_error)
    }
    return verify(bench, plans, tick)
