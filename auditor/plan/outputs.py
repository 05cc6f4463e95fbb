"""The third precision of a product, low inputs and FP32 output: which products can have it, and which choices try it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ..numerics.fp32_output import FACTORS
from ..numerics.operations import operation
from ..paths import FP32_OUTPUT, function_in, module_of
from .mincut import Candidate
from .modules import Modules, evaluate
from .problem import Problem

Products = Mapping[str, frozenset[str]]
"""{path of a function with FP32 output: its products}."""


def products_of(problem: Problem) -> Products:
    """The functions that may have FP32 output: all their products are directly in one module.

    Calls in submodules would have FP32 output too, so such functions are left out; so are author's autocast regions,
    shared modules, and products that no plan lowers.
    """
    able, unable = defaultdict[str, set[str]](set), set[str]()
    for name, node in problem.capture.nodes.items():
        row = operation(node.op)
        if node.function is None or row.packet not in FACTORS:
            continue
        for call in node.calls:
            path = function_in(call.path, f"{node.function.path}{FP32_OUTPUT}")
            simple = node.region is None and not node.in_place and node.owner not in problem.capture.aliases
            if call.path == node.owner and simple and node.dtype == "float32" and name not in problem.kept_formats:
                able[path].add(name)
            else:
                unable.add(path)
    return {path: frozenset(names) for path, names in able.items() if path not in unable}


def with_fp32_output(problem: Problem, products: Products, low: Candidate, owner: str) -> Iterator[Candidate]:
    """The choice in which the products of a module, or of a function in it, have FP32 output; nothing without products.
    low: the choice with the owner low."""
    paths = {path for path in products if owner in (module_of(path), path.removesuffix(FP32_OUTPUT))}
    if paths and module_of(owner) not in low.high:
        yield evaluate(problem, low.high | paths)


def lowest_with_fp32_output(space: Modules, limit: float) -> Iterator[Candidate]:
    """Everything in low precision except outputs of products that are not safe: as few of them as are predicted to keep
    the error within the limit, those that save most error per second first. Nothing if all of them are too few."""
    problem, low = space.problem, space.low

    def worth(path: str) -> float:
        cost = sum(problem.elements[name] for name in products[path])
        known = (problem.contribution(name, problem.format) for name in products[path])
        return sum(one.own**2 for one in known if one is not None) / cost if cost else math.inf

    products = {
        path: names
        for path, names in products_of(problem).items()
        if any(problem.verdicts[name].verdict in ("sensitive", "unsafe") for name in names)
    }
    order = sorted(products, key=lambda path: (-worth(path), path))
    few, many = 0, len(order) + 1  # bisection: `few` are too few, `many` are enough
    while many - few > 1:
        middle = (few + many) // 2
        point = evaluate(problem, low.high.union(order[:middle]))
        few, many = (few, middle) if point.predicted_error <= limit else (middle, many)
    if many <= len(order):
        yield evaluate(problem, low.high.union(order[:many]))
