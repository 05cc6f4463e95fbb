"""The cut: no choice of precisions is cheaper, by enumeration, and it is found in time on a large graph."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from auditor.graphs.choices import Operations, cuts_of
from auditor.graphs.operations import Table, Value
from tests.unit.graphs.models import drawn, long, made


def low_at(table: Table, multiplier: float) -> frozenset[str]:
    """What is low at the cut."""
    return table.may_be_low().difference(cuts_of(table).best(multiplier))


def under(table: Table, low: frozenset[str], multiplier: float) -> float:
    """What a cut minimises."""
    price, square = table.price(low)
    return price + multiplier * square


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_cheaper(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(6):
        table = drawn(rnd, rnd.randint(2, 7))
        free = sorted(table.may_be_low())
        choices = [frozenset(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n)]
        for multiplier in (0.0, 0.1, 0.5, 1.0, 3.0, 10.0):
            least = min(under(table, low, multiplier) for low in choices)
            assert under(table, low_at(table, multiplier), multiplier) == pytest.approx(least, abs=1e-9)


def two_readers(cast: float) -> Table:
    """An FP32 value that two operations read, each of which saves 0.4 by running low and returns nothing."""
    operations = {name: made(name, ("input",), 0.6, 1.0) for name in ("left", "right")}
    return Table("fp16", operations, {"input": Value("input", None, cast, 0.01)})


def test_a_cast_that_two_read_is_paid_once() -> None:
    table, both = two_readers(cast=0.6), frozenset({"left", "right"})
    assert low_at(table, 0.0) == both
    assert table.price(both) == pytest.approx((2 * 0.6 + 0.6, 0.01))
    assert low_at(two_readers(cast=0.9), 0.0) == frozenset()


def test_what_changes_with_one_operation_is_what_the_whole_price_changes_by() -> None:
    rnd = random.Random(5)
    table = drawn(rnd, 7)
    low = frozenset(name for name in table.may_be_low() if rnd.random() < 0.5)
    for name in table.operations.keys() - low:
        more = low | {name}
        whole, part = (table.price(more, of)[0] - table.price(low, of)[0] for of in (None, name))
        assert part == pytest.approx(whole, abs=1e-12)


def test_five_thousand_operations_take_less_than_twenty_seconds() -> None:
    table = long(5_000)
    start = time.perf_counter()
    space = Operations(table, None)  # type: ignore[arg-type]
    sizes = [len(space.proposed(allowed).low) for allowed in (1.0, 1e-3, 0.0)]
    assert time.perf_counter() - start < 20
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 4_000
    assert sizes[-1] == 0
