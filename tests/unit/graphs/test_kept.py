"""Why operations stay FP32: each reason holds when it is tried."""

from __future__ import annotations

import math
import random

from auditor.graphs.choices import Operations, kept_of
from auditor.graphs.operations import Table, Value
from auditor.plan.search import choose
from tests.unit.graphs.models import drawn, made

NO_CHOICE = "no choice on the curve of cuts with it low holds the budget"


def test_every_reason_holds() -> None:
    rnd, kinds = random.Random(3), set()
    for _ in range(30):
        table = drawn(rnd, 6)
        space = Operations(table, None)  # type: ignore[arg-type]
        choice = choose(space, 0.3, 0)
        for kept in kept_of(space, choice, 0.3):
            kinds.add(kept.kind)
            if kept.kind == "unsafe":
                assert kept.because == table.operations[kept.name].kept != ""
                continue
            (now, had), (then, has) = table.price(choice.low), table.price(choice.low | {kept.name})
            if kept.kind == "no-gain":
                assert then >= now - 1e-12
                continue
            assert then < now
            numbers = f"from {math.sqrt(had):.2g} to {math.sqrt(has):.2g}"
            assert kept.because == NO_CHOICE if math.sqrt(has) <= 0.3 else numbers in kept.because
    assert kinds == {"unsafe", "no-gain", "budget"}


def test_where_the_prediction_holds_and_runs_do_not_the_smallest_run_is_named() -> None:
    operations = {name: made(name, ("x",), 0.5, 1.0, 1e-6) for name in ("a", "b", "c")}
    table = Table("fp16", operations, {"x": Value("x", None, 0.0, 0.0)})
    runs = {frozenset("abc"): math.inf, frozenset("ab"): 0.5, frozenset("a"): 0.01}
    space = Operations(table, None)  # type: ignore[arg-type]
    space.log |= runs
    said = {each.name: each.because for each in kept_of(space, space.nothing, 0.1)}
    assert said["a"] == said["b"] == "run with it and 1 other low, the graph is off by 0.5"
    assert said["c"] == "run with it and 2 others low, the graph gives what is not finite"
