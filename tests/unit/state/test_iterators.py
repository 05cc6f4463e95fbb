"""Iterators that stand, after a run, where they stood before it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from auditor.state.iterators import as_it_is, moved_on

MAKE: dict[str, Callable[[], Iterator[Any]]] = {
    "count": lambda: itertools.count(3, 2),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "list": lambda: iter([1, 2, 3, 4, 5, 6]),
    "tuple": lambda: iter((1, 2, 3, 4, 5, 6)),
    "range": lambda: iter(range(9)),
    "long range": lambda: iter(range(2**70)),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("begun", [0, 1, 3, 4])
def test_a_copy_goes_on_where_the_iterator_stood(name: str, begun: int) -> None:
    value, other = MAKE[name](), MAKE[name]()
    for _ in range(begun):
        assert next(value) == next(other)
    kept = as_it_is(value)
    assert not moved_on(value, kept)
    for _ in range(2):
        assert next(value) == next(other)
        assert moved_on(value, kept)
    again = MAKE[name]()
    for _ in range(begun):
        next(again)
    assert [next(kept) for _ in range(2)] == [next(again) for _ in range(2)]


def test_one_at_its_end() -> None:
    value = iter([1])
    kept = as_it_is(value)
    assert list(value) == [1]
    assert moved_on(value, kept)
    assert list(kept) == [1]


def test_others_are_not_touched() -> None:
    drawn = (x for x in [1, 2])
    for value in (drawn, map(str, [1]), [1], 3, None, open):
        assert as_it_is(value) is None
    assert list(drawn) == [1, 2]
