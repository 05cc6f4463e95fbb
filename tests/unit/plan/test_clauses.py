"""Clauses of reasons: the numbers that they are given stand in them, and different ones read differently."""

from __future__ import annotations

import math

import pytest

from auditor.plan.clauses import added, apart, count, gained, no_gain


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.014, 0.02), ("0.014", "0.02")),
        ((0.0141, 0.0142), ("0.0141", "0.0142")),
        ((0.01411, 0.01412), ("0.01411", "0.01412")),
        ((0.5, 0.5), ("0.5", "0.5")),
        ((0.00797, 0.0083, 0.008), ("0.00797", "0.0083", "0.008")),
    ],
)
def test_numbers_that_differ_read_differently(values: tuple[float, ...], texts: tuple[str, ...]) -> None:
    assert apart(*values) == texts


def test_the_budget() -> None:
    assert added(0.0079, 0.0131, 0.01, 0.8, 0.013, "time", True) == (
        "lowering it takes the error from 0.0079 to 0.013, and saves 1.3% of the time; 0.0021 of the budget of 0.01 is left"
    )
    assert "is predicted to take" in added(0.0079, 0.0131, 0.01, 0.8, 0.013, "time", False)
    assert "0 of the budget" in added(0.012, 0.013, 0.01, 0.8, 0.1, "memory", True)


def test_room_for_other_inputs() -> None:
    assert added(0.0079, 0.0083, 0.01, 0.8, 0.1, "time", True) == (
        "lowering it takes the error from 0.0079 to 0.0083, which leaves less of the budget of 0.01 than the safety margin of 20%"
    )
    assert added(0.001, 0.002, 0.01, 0.8, 0.1, "time", True).endswith("the plan was better by less than 1%, if at all")


def test_gains() -> None:
    assert gained(0.0, "time") == gained(-0.2, "time") == "saves no time"
    assert gained(0.0004, "flops") == "saves less than 0.1% of the FP32 FLOPs"
    assert gained(0.25, "memory") == "saves 25.0% of the memory"
    assert no_gain(0.0, "time", alone=False) == "lowering it saves no time"
    assert no_gain(0.0, "time", alone=True) == "lowering it alone saves no time; not all of this can be low together"
    assert no_gain(0.0123, "time", alone=False) == (
        "lowering it saves at most 1.2% of the time, less than the scopes that it adds to the plan must save"
    )
    assert no_gain(0.0001, "time", alone=True).startswith(
        "lowering it alone saves less than 0.1% of the time, less than"
    )
    assert (count(1, "module"), count(3000, "module")) == ("1 module", "3,000 modules")


def test_what_fails_low_has_no_error_to_speak_of() -> None:
    said = added(0.001, math.inf, 0.01, 0.8, 0.07, "time", ran=True)
    assert "inf " not in said
    assert said == "low, it makes the model fail or its outputs non-finite"
