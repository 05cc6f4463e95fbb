"""Clauses of reasons: the numbers that they are given stand in them, and different ones read differently."""

from __future__ import annotations

import math

import pytest

from auditor.plan.clauses import apart, close, count, gained, little, no_gain, over


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
    assert over(0.0079, 0.0131, 0.01, 0.013, "time", True) == (
        "lowering it takes the error from 0.0079 to 0.013, and saves 1.3% of the time; 0.0021 of the budget of 0.01 is left"
    )
    assert "is predicted to take" in over(0.0079, 0.0131, 0.01, 0.013, "time", False)
    assert "0 of the budget" in over(0.012, 0.013, 0.01, 0.1, "memory", True)


def test_room_for_other_inputs() -> None:
    words = close(0.0079, 0.0083, 0.01, 0.008, True)
    assert words.startswith("lowering it takes the error from 0.0079 to 0.0083, within the budget of 0.01")
    assert "made to use 0.008" in words
    assert close(0.001, 0.001, 0.01, 0.0008, True).startswith("lowering it leaves the error at 0.001, within")
    assert close(0.001, 0.002, 0.01, 0.008, True) == (
        "lowering it alone takes the error from 0.001 to 0.002; low together with what else could be, the plan was better by less than 1%, if at all"
    )


def test_gains() -> None:
    assert gained(0.0, "time") == gained(-0.2, "time") == "saves no time"
    assert gained(0.0004, "flops") == "saves less than 0.1% of the FP32 FLOPs"
    assert gained(0.25, "memory") == "saves 25.0% of the memory"
    assert no_gain(0.0, "time", 1, 0.003) == "lowering it saves no time"
    assert no_gain(0.002, "time", 1, 0.003) == (
        "lowering it saves 0.2% of the time, where one more scope in the plan must save 0.3%"
    )
    assert "3 more scopes in the plan must save 2.1%" in no_gain(0.008, "time", 3, 0.021)
    assert no_gain(0.0, "time", 1, 0.003, alone=True) == (
        "lowering it alone saves no time; not all of which this is said can be low together"
    )
    assert little(0.0123, "time") == (
        "lowering it saves at most 1.2% of the time, less than the scopes that it adds to the plan must save"
    )
    assert little(0.0001, "time", alone=True).startswith(
        "lowering it alone saves less than 0.1% of the time, less than"
    )
    assert (count(1, "module"), count(3000, "module")) == ("1 module", "3,000 modules")


def test_what_fails_low_has_no_error_to_speak_of() -> None:
    said = over(0.001, math.inf, 0.01, 0.07, "time", ran=True)
    assert "inf " not in said
    assert said == "low, it makes the model fail or its outputs non-finite"
