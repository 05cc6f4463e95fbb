"""The cut: no choice of precisions is cheaper, by enumeration."""

import itertools
import math
import random

import pytest

from auditor.graphs.operations import Table, Value
from auditor.graphs.stage import OperationRefused, Operations, cuts_of, kept_of
from auditor.paths import FP32_OUTPUT
from auditor.plan.search import choose
from tests.unit.graphs.conftest import drawn, made


def low_at(table: Table, multiplier: float) -> frozenset[str]:
    """What is low at the cut."""
    return table.free.difference(cuts_of(table).best(multiplier))


def under(table: Table, low: frozenset[str], multiplier: float) -> float:
    """What a cut minimizes."""
    price, square = table.price(low)
    return price + multiplier * square


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_cheaper(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(6):
        table = drawn(rnd, rnd.randint(2, 7))
        free = sorted(table.free)
        sets = (frozenset(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n))
        choices = [low for low in sets if all(name.removesuffix(FP32_OUTPUT) in low for name in low)]
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


def test_less_error_leaves_fewer_of_many_operations_low() -> None:
    space = Operations(chain(*(10.0 ** -(2 + i / 10) for i in range(100))), None)
    sizes = [len(space.low(space.propose(allowed))) for allowed in (1.0, 1e-3, 0.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 100 > sizes[1] > sizes[2] == 0


def chain(*errors: float) -> Table:
    """Operations one after the other, each twice as fast low, which adds these squared errors."""
    operations, values = {}, {"value_0": Value("value_0", None, 0.01, 0.0)}
    for index, error in enumerate(errors):
        operations[f"op_{index}"] = made(f"op_{index}", (f"value_{index}",), 0.5, 1.0, error)
        values[f"value_{index + 1}"] = Value(f"value_{index + 1}", f"op_{index}", 0.01, 0.0)
    return Table("fp16", operations, values)


class Runs:
    """Stands for a trial: runs err as predicted; `broken` raises low."""

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def error(self, table: Table, low: frozenset[str]) -> float:
        if self.broken in low:
            raise OperationRefused(self.broken, RuntimeError("there is no kernel"))
        return math.sqrt(table.price(low)[1])


def test_what_raises_is_no_choice() -> None:
    space = Operations(chain(1e-6, 1e-6, 1e-6), Runs("op_1"))
    assert "op_1" in choose(space, 0.01).high
    assert space.log[frozenset()] == math.inf


NO_CHOICE = "no tested plan with this operation in low precision meets the error budget"


def test_every_reason_holds() -> None:
    rnd, kinds = random.Random(3), set()
    for _ in range(30):
        table = drawn(rnd, 6)
        space = Operations(table, None)
        low = space.low(space.propose(0.3))
        for kept in kept_of(table, low, 0.3):
            kinds.add(kept.kind)
            if kept.kind == "unsafe":
                assert kept.because == table.operations[kept.name].kept != ""
                continue
            whole = table.whole(kept.name) & table.free
            (now, had), (then, has) = table.price(low), table.price(low | whole)
            if kept.kind == "no-gain":
                assert then >= now - 1e-12
                continue
            assert then < now
            numbers = f"from {math.sqrt(had):.2g} to {math.sqrt(has):.2g}"
            assert kept.because == NO_CHOICE if math.sqrt(has) <= 0.3 else numbers in kept.because
    assert kinds == {"unsafe", "no-gain", "budget"}
