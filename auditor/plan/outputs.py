"""Matrix products with low-precision inputs and FP32 output: which products can have FP32 output, and its cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..execution.policy import PrecisionChoice
from ..execution.resolve import Resolution
from ..numerics.formats import FORMATS
from ..numerics.fp32_output import FACTORS
from ..numerics.operations import operation
from ..records import Contribution
from ..records.paths import FP32_OUTPUT, enclosing_paths, function_in, module_of
from .costs import Cost
from .search import Candidate

if TYPE_CHECKING:
    from .problem import Problem


def products_of(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{path of a function that can have FP32 output: its matrix products}. Without functions that submodules also call;
    without products that are in place, in shared modules, in autocast regions, or have a dtype fixed by the model."""
    able, unable = defaultdict[str, set[str]](set), set[str]()
    for name, node in problem.capture.nodes.items():
        if node.function is None or operation(node.op).packet not in FACTORS:
            continue
        for call in node.calls:
            path = function_in(call.path, f"{node.function.path}{FP32_OUTPUT}")
            simple = node.region is None and not node.in_place and node.owner not in problem.capture.aliases
            if call.path == node.owner and simple and node.dtype == "float32" and name not in problem.kept_formats:
                able[path].add(name)
            else:
                unable.add(path)
    return {path: frozenset(names) for path, names in able.items() if path not in unable}


def outputs_in(problem: Problem, owner: str) -> set[str]:
    """Paths of the functions that can have FP32 output in `owner`, a module or one function in a module."""
    return {path for path in problem.products if owner in (module_of(path), path.removesuffix(FP32_OUTPUT))}


def outputs_of(choice: PrecisionChoice) -> set[str]:
    """Paths of the functions that have FP32 output in a choice."""
    return {function_in(path, f"{name}{FP32_OUTPUT}") for path, names in choice.fp32_output.items() for name in names}


def without_effect(high: Collection[str]) -> set[str]:
    """Paths whose FP32 output has no effect, as the module is FP32, or a plan keeps the whole function in FP32."""
    found = ((path, *path.removesuffix(FP32_OUTPUT).rpartition("..")) for path in high if path.endswith(FP32_OUTPUT))
    return {
        path
        for path, module, _, name in found
        if module in high or any(function_in(above, name) in high for above in enclosing_paths(module))
    }


def cost_of(problem: Problem, name: str, resolution: Resolution) -> Cost:
    """Cost of one node; an FP32 output element counts as two or four elements of the inputs' format."""
    cost, factors = problem.costs[name], resolution.nodes[name].factors
    wider = FORMATS["fp32"].bytes // FORMATS[factors].bytes - 1 if factors else 0
    return replace(cost, elements=cost.elements + wider * problem.elements[name]) if wider else cost


def fails_by_inputs(known: Contribution | None) -> bool:
    """Whether a product is unsafe even with FP32 output: not run, or Inf or NaN by the rounding of its inputs."""
    return known is None or math.isfinite(known.own) > math.isfinite(known.isolated)


def with_fewest_outputs(problem: Problem, low: Candidate, limit: float) -> Iterator[Candidate]:
    """Yield one choice, if any has a predicted error within `limit`: everything in low precision, except outputs of the
    fewest possible sensitive or unsafe products, chosen by squared error per output element."""

    def worth(path: str) -> float:
        known = (problem.contribution(name, problem.format) for name in problem.products[path])
        numbers = sum(problem.elements[name] for name in problem.products[path])
        return sum(one.own**2 for one in known if one is not None) / max(numbers, 1)

    doubtful = {name for name, known in problem.verdicts.items() if known.verdict in ("sensitive", "unsafe")}
    order = sorted((path for path, names in problem.products.items() if names & doubtful), key=worth, reverse=True)
    choices = [low.high.union(order[: number + 1]) for number in range(len(order))]
    fewest = bisect_left(choices, True, key=lambda high: problem.evaluate(high).predicted_error <= limit)
    if fewest < len(choices):
        yield problem.evaluate(choices[fewest])
