"""Parts of a model by kind of operation, and how much the error of each part under a plan changes the margins of
tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from torch import fx

from ..execution.policy import choice_from_scopes
from ..numerics.nodes import row_of, tensors_of
from ..plan.problem import Problem
from ..records import Capture, Plan
from ..records.generation import PartShare

WEIGHTS = "weights, rounded"


def parts_of(capture: Capture) -> dict[str, str]:
    """{node or placeholder: its part}: by its row in the table of operations, and by the operations that read it."""
    nodes = list(capture.graph_module.graph.nodes)
    rotary, cached, routed = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in nodes:
        row = row_of(node)
        if row.wave or (not (row.product or row.attention) and rotary & set(node.all_input_nodes)):
            rotary.add(node)
        if row.attention:
            for source in node.all_input_nodes[1:3]:
                cached.update(_through(source))
    for node in reversed(nodes):
        discrete = any(not x.is_floating_point() for x in tensors_of(node.meta.get("val")))
        if node.op == "call_function" and discrete and not row_of(node).asks_shape:
            for source in node.all_input_nodes:
                if source.op == "call_function" and any(x.is_floating_point() for x in tensors_of(source.meta["val"])):
                    routed.update(_of_product(source))
    head = set(_through(next((n for n in nodes if n.name == capture.outputs[0]), nodes[-1])))
    result = {}
    for node in nodes:
        row, owner = row_of(node), capture.nodes.get(node.name)
        parts = {
            WEIGHTS: node.op != "call_function",
            "head": node in head,
            "router": node in routed,
            "keys and values": node in cached,
            "norms": row.normalizes or (owner is not None and "norm" in owner.owner_type.lower()),
            "softmax and attention": row.attention or row.distribution,
            "linear layers": row.product or row.embedding or row.recurrent,
            "rotary tables": node in rotary,
            "residual sums": row.sum,
        }
        result[node.name] = next((part for part, is_one in parts.items() if is_one), "activations and the rest")
    return result


def _through(node: fx.Node) -> list[fx.Node]:
    """A node and its inputs, through reshapes and casts, up to the operation that computes the value."""
    result = [node]
    while row_of(result[-1]).transparent and result[-1].all_input_nodes:
        result.append(result[-1].all_input_nodes[0])
    return result


def _of_product(node: fx.Node) -> list[fx.Node]:
    """A node and its inputs up to the first matrix product, which computes the logits or scores."""
    result = [node]
    while not row_of(result[-1]).product and len(result) < len(node.graph.nodes):
        before = [source for source in result[-1].all_input_nodes if source.op == "call_function"]
        if not before:
            return []
        result.append(before[0])
    return result


def shares(problem: Problem, plan: Plan, flips: Callable[[float], float | None]) -> tuple[float, tuple[PartShare, ...]]:
    """A plan's first-order error, and each part's share of its square. flips: converts an error to expected flips."""
    resolution = problem.resolve(choice_from_scopes(plan.scopes))
    of, squares, counts = parts_of(problem.capture), defaultdict[str, float](float), defaultdict[str, int](int)
    each = [(name, problem.node_square(resolution, name)) for name in problem.capture.nodes]
    each += [(name, problem.cast_square(resolution, name)) for name in problem.rounded_values(resolution)]
    for name, square in each:
        if square > 0 and math.isfinite(square):
            squares[of[name]] += square
            counts[of[name]] += 1
    total = sum(squares.values())

    found = [
        PartShare(part, square / total, counts[part], flips(math.sqrt(max(total - square, 0.0))))
        for part, square in squares.items()
    ]
    return math.sqrt(total), tuple(sorted(found, key=lambda one: -one.share))
