"""Clauses of reasons: the numbers that they are given stand in them, and different ones read differently."""

from __future__ import annotations

import math

import pytest

from auditor.plan.clauses import added, apart, gained, no_gain


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.014, 0.02), ("0.014", "0.02")),
        ((0.01411, 0.01412), ("0.01411", "0.01412")),
        ((0.5, 0.5), ("0.5", "0.5")),
        ((0.00797, 0.0083, 0.008), ("0.00797", "0.0083", "0.008")),
    ],
)
def test_numbers_that_differ_read_differently(values: tuple[float, ...], texts: tuple[str, ...]) -> None:
    assert apart(*values) == texts


def test_the_numbers_stand_in_the_clause() -> None:
    said = (
        "the error from 0.0079 to 0.013, where plans use 80% of the budget of 0.01, and saves at most 1.3% of the time"
    )
    assert added(0.0079, 0.0131, 0.01, 0.8, 0.013, "time", True) == f"lowering it takes {said}"
    assert added(0.0079, 0.0131, 0.01, 0.8, 0.013, "time", False) == f"lowering it is predicted to take {said}"
    assert "inf" not in added(0.001, math.inf, 0.01, 0.8, 0.07, "time", ran=True).split()
    assert gained(-0.2, "time") == "saves no time"
    assert gained(0.0004, "flops") == "saves at most 0.1% of the FP32 FLOPs"
    assert no_gain(0.0, "time", alone=True) == "lowering it alone saves no time"
    more = "below the threshold for one more change of precision"
    assert no_gain(0.0123, "time", alone=False) == f"lowering it saves at most 1.2% of the time, {more}"
