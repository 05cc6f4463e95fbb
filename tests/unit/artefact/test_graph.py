"""The strategy whose plans are programs: known where it is asked for, and no change to a live module."""

from __future__ import annotations

import pytest
from torch import nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.strategies import GRAPHS, SHIPPED, known, names, strategy_of


def test_it_is_known_and_not_planned_by_default() -> None:
    assert GRAPHS == ("graph",)
    assert "graph" in known()
    assert "graph" not in (*SHIPPED, *names())
    found = strategy_of("graph")
    assert found.per_operation
    assert not found.trains
    assert not any(strategy_of(name).per_operation for name in SHIPPED)


def test_a_live_module_is_told_where_the_program_is() -> None:
    model = nn.Linear(2, 2)
    plan = {"strategy": "graph", "format": "fp16", "scopes": {"": {"precision": "fp16"}}}
    with pytest.raises(ValueError, match=r"torch\.export\.load"):
        apply_plan(model, plan)
    assert "forward" not in vars(model)
