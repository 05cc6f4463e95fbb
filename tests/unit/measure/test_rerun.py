"""Which operations are run again: the heaviest first, so many, and none of a model that is too large."""

from __future__ import annotations

from auditor.measure.rerun import Limits, chosen

WEIGHTS = {"a": 1.0, "b": 3.0, "c": 1.0, "d": 2.0}


def test_the_heaviest_come_first_and_equals_as_they_stand() -> None:
    assert chosen(WEIGHTS, WEIGHTS.__getitem__, Limits(10)) == ["b", "d", "a", "c"]
    assert chosen("xyz", lambda name: name == "z", Limits(10)) == ["z", "x", "y"]


def test_so_many_and_no_more() -> None:
    assert chosen(WEIGHTS, WEIGHTS.__getitem__, Limits(2)) == ["b", "d"]


def test_a_large_model_is_not_run_again() -> None:
    assert chosen(WEIGHTS, WEIGHTS.__getitem__, Limits(2, 100), elements=100) == ["b", "d"]
    assert chosen(WEIGHTS, WEIGHTS.__getitem__, Limits(2, 100), elements=101) == []
