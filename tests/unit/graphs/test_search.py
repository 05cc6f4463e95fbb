"""From cuts to a choice: within the budget as it runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from auditor.graphs.choices import Choice, Operations, Refused
from auditor.graphs.operations import Table, Value
from auditor.plan.search import choose
from tests.unit.graphs.models import made


def chain(*errors: float) -> Table:
    """Operations one after the other, each twice as fast low, which adds these squared errors."""
    operations, values = {}, {"value_0": Value("value_0", None, 0.01, 0.0)}
    for index, error in enumerate(errors):
        operations[f"op_{index}"] = made(f"op_{index}", (f"value_{index}",), 0.5, 1.0, error)
        values[f"value_{index + 1}"] = Value(f"value_{index + 1}", f"op_{index}", 0.01, 0.0)
    return Table("fp16", operations, values)


class Runs:
    """Stands for a trial: runs are off by `factor` from what is predicted; `broken` raises low."""

    def __init__(self, factor: float, broken: str = "") -> None:
        self.factor, self.broken, self.count = factor, broken, 0

    def error(self, table: Table, low: frozenset[str]) -> float:
        self.count += 1
        if self.broken in low:
            raise Refused(self.broken, RuntimeError("there is no kernel"))
        return self.factor * math.sqrt(table.price(low)[1])


def search(table: Table, trial: Any, budget: float) -> tuple[Operations, Choice]:
    space = Operations(table, trial)
    return space, choose(space, budget)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_what_is_chosen_holds_as_it_runs_and_leaves_little(factor: float) -> None:
    table, runs = chain(1e-6, 4e-6, 1e-4, 2e-6, 1e-2), Runs(factor)
    _, found = search(table, runs, 0.01)
    assert runs.error(table, found.low) <= 0.01
    for name in table.may_be_low() - found.low:
        assert runs.error(table, found.low | {name}) > 0.01


def test_what_its_artefact_did_not_bear_out_is_not_chosen_again() -> None:
    space, found = search(chain(1e-6, 1e-6), Runs(1.0), 0.01)
    space.rejected.add(found.low)
    assert space.error(found) == math.inf
    again = choose(space, 0.01)
    assert again.low < found.low
    assert space.log[found.low] <= 0.01  # what the run said stays for the reasons


def test_what_raises_is_no_choice() -> None:
    space, found = search(chain(1e-6, 1e-6, 1e-6), Runs(1.0, "op_1"), 0.01)
    assert "op_1" not in found.low
    assert space.log[frozenset(space.table.operations)] == math.inf
