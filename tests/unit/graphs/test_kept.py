"""Why operations stay FP32: each reason holds when it is tried."""

from __future__ import annotations

import math
import random

from auditor.graphs.cut import Network
from auditor.graphs.kept import kept_of
from auditor.graphs.search import Choice, search
from tests.unit.graphs.models import drawn


def test_every_reason_holds() -> None:
    rnd, kinds = random.Random(3), set()
    for _ in range(30):
        table = drawn(rnd, 6)
        choice, network = search(table, None, 0.3), Network(table)
        for kept in kept_of(network, choice, 0.3, {}):
            kinds.add(kept.kind)
            if kept.kind == "unsafe":
                assert kept.because == table.operations[kept.name].kept != ""
                continue
            now, then = network.price(choice.low), network.price(choice.low | {kept.name})
            if kept.kind == "no-gain":
                assert then.seconds >= now.seconds - 1e-12
            else:
                assert then.seconds < now.seconds
                if math.sqrt(then.square) <= 0.3:
                    assert kept.because == "no choice on the curve of cuts with it low holds the budget"
                    continue
                assert f"from {math.sqrt(now.square):.2g} to {math.sqrt(then.square):.2g}" in kept.because
    assert kinds == {"unsafe", "no-gain", "budget"}


def test_where_the_prediction_holds_and_runs_do_not_the_smallest_run_is_named() -> None:
    table = drawn(random.Random(4), 6)
    free = sorted(table.may_be_low())
    choice, network = Choice(table, frozenset()), Network(table)
    runs = {frozenset(free): math.inf, frozenset(free[:2]): 0.5, frozenset(free[:1]): 0.01}
    said = {each.name: each.because for each in kept_of(network, choice, 10.0, runs) if each.kind == "budget"}
    assert said.pop(free[0], None) == said.pop(free[1], None) == "run with it and 1 other low, the graph is off by 0.5"
    assert set(said.values()) <= {f"run with it and {len(free) - 1} others low, the graph gives what is not finite"}
