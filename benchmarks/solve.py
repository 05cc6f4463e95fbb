"""Time of the solver alone against the size of the graph: costs and errors are drawn, the graph is a real capture."""

from __future__ import annotations

import argparse
import json
import random

from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.capture.capture import capture
from auditor.isolation import in_eval
from auditor.loading import from_object
from auditor.plan.costs import costs_of
from auditor.plan.problem import Problem
from auditor.records import Capture, Contribution, Verdict
from benchmarks.harness import Row, in_process_of_its_own, report, seconds
from benchmarks.subjects import vit

LAYERS = (16, 64, 240)
UNSAFE = 0.02
"""Share of the nodes that must not run low."""

BUDGET = 0.05

COLUMNS = {
    "strategy": "",
    "layers": "d",
    "nodes": "d",
    "scopes": "d",
    "solved s": ".2f",
    "ms per node": ".2f",
}


def at_depth(layers: int) -> list[Row]:
    """Under both strategies the cheapest choice within an error, from nothing."""
    model, args = vit(layers)
    with in_eval(model):
        graph = capture(from_object(model, args, {}))
    return [timed(drawn(graph, strategy), layers) for strategy in STRATEGIES]


def timed(problem: Problem, layers: int) -> Row:
    """One problem solved."""
    elapsed = seconds(lambda: problem.cheapest(BUDGET))
    nodes = len(problem.capture.nodes)
    return {
        "strategy": problem.strategy,
        "layers": layers,
        "nodes": nodes,
        "scopes": len({node.owner for node in problem.capture.nodes.values()}),
        "solved s": elapsed,
        "ms per node": 1000 * elapsed / nodes,
    }


def drawn(graph: Capture, strategy: str) -> Problem:
    """The graph with errors that spread over four decades, and some nodes that must not run low."""
    rnd = random.Random(0)

    def contribution() -> Contribution:
        isolated = 10 ** rnd.uniform(-6, -2)
        return Contribution(isolated, isolated * rnd.random(), isolated * rnd.random())

    names = [*graph.nodes, *(placeholder.name for placeholder in graph.placeholders)]
    errors = {name: contribution() for name in names}
    verdicts = {name: Verdict("unsafe" if rnd.random() < UNSAFE else "safe", "drawn") for name in graph.nodes}
    return Problem(graph, costs_of(graph.graph_module.graph), {"bf16": errors}, verdicts, strategy, "bf16", "A100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=int, metavar="LAYERS", help="one depth, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps({"rows": at_depth(options.measure)}))
        return
    measured = [in_process_of_its_own("benchmarks.solve", "--measure", str(layers)) for layers in LAYERS]
    report("solve", [row for found in measured for row in found["rows"]], COLUMNS)


if __name__ == "__main__":
    main()
