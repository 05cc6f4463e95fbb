"""Matrix products with low-precision inputs and FP32 output: which products can have FP32 output, and its cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from ..execution.policy import PrecisionChoice
from ..numerics.formats import FORMATS
from ..numerics.fp32_output import FACTORS
from ..numerics.operations import operation
from ..records import Capture, Contribution
from ..records.paths import FP32_OUTPUT, enclosing_paths, function_in, module_of
from .costs import Cost


def products_of(capture: Capture, fixed: Collection[str]) -> Mapping[str, frozenset[str]]:
    """{path of a function that can have FP32 output: its matrix products}. Without functions that submodules also call;
    without products that are in place, in shared modules or in autocast regions. fixed: nodes whose dtype the model
    fixes, which are left out too."""
    able = defaultdict[str, set[str]](set)
    unable = defaultdict[str, set[str]](set)
    for name, node in capture.nodes.items():
        if node.function is None or operation(node.op).packet not in FACTORS:
            continue
        for call in node.calls:
            path = function_in(call.path, f"{node.function.path}{FP32_OUTPUT}")
            simple = node.region is None and not node.in_place and node.owner not in capture.aliases
            own = call.path == node.owner and node.dtype == "float32" and name not in fixed
            fitting = able if simple and own else unable
            fitting[path].add(name)
    return {path: frozenset(names) for path, names in able.items() if path not in unable}


def outputs_in(products: Collection[str], owner: str) -> set[str]:
    """Paths of the functions in `owner`, a module or one function in a module, among those that can have FP32 output.

    products: paths of the functions that can, as in `products_of`.
    """
    return {path for path in products if owner in (module_of(path), path.removesuffix(FP32_OUTPUT))}


def outputs_of(choice: PrecisionChoice) -> set[str]:
    """Paths of the functions that have FP32 output in a choice."""
    return {function_in(path, f"{name}{FP32_OUTPUT}") for path, names in choice.fp32_output.items() for name in names}


def without_effect(high: Collection[str]) -> set[str]:
    """Paths whose FP32 output has no effect, as the module is FP32, or a plan keeps the whole function in FP32."""
    outputs = ((path, *path.removesuffix(FP32_OUTPUT).rpartition("..")) for path in high if path.endswith(FP32_OUTPUT))
    return {
        path
        for path, module, _, name in outputs
        if module in high or any(function_in(above, name) in high for above in enclosing_paths(module))
    }


def with_fp32_output(cost: Cost, factors: str | None, elements: int) -> Cost:
    """The cost of a node whose FP32 output elements count as two or four elements of the inputs' format.

    factors: the format of the inputs of a product with FP32 output; None for other nodes. elements: number of output
    elements.
    """
    if not factors:
        return cost
    wider = FORMATS["fp32"].bytes // FORMATS[factors].bytes - 1
    return replace(cost, elements=cost.elements + wider * elements)


def fails_by_inputs(known: Contribution | None) -> bool:
    """Whether a product is unsafe even with FP32 output: not run, or Inf or NaN by the rounding of its inputs."""
    return known is None or math.isfinite(known.own) > math.isfinite(known.isolated)
