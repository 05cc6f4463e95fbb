"""Why operations in modules that run low do not: what autocast does by itself, what the author wrote, what they are handed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..formats.table import label
from ..ops.table import operation
from ..records import Capture, Node, Reason
from ..replay.resolve import Resolution, is_low
from ..replay.running import Running
from ..replay.strategies import running
from .problem import Problem
from .reasons import together
from .solve import Candidate


def operation_reasons(problem: Problem, chosen: Candidate) -> tuple[Reason, ...]:
    """A reason for every operation that is not low though its module is, and for those without a precision."""

    def precision(owner: str) -> str:
        return chosen.precision.get(owner, "fp32")

    how = running(problem.capture, problem.strategy, precision, problem.format)
    resolution, told = problem.resolve(precision), _told(problem.capture)
    found = []
    for name, node in problem.capture.nodes.items():
        if is_low(resolution.computed(name)) or (not node.floating and resolution.touches_low(name)):
            continue
        if not node.floating:
            found.append(Reason("not-floating", "it is no floating-point operation", operations=(name,)))
        elif how.setting(name).precision != "fp32":
            kind, words, by = _why(problem, resolution, how, node, told[name])
            found.append(Reason(kind, words, operations=(name,), by=by))
    return together(found)


def _told(capture: Capture) -> Mapping[str, bool]:
    """{node: whether a dtype is written among its arguments}."""
    graph = capture.graph_module.graph
    return {
        node.name: any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))
        for node in graph.nodes
    }


def _why(problem: Problem, resolution: Resolution, how: Running, node: Node, told: bool) -> tuple[str, str, str | None]:
    """Kind, clause, and which node decides."""
    given, row = label(resolution.dtypes[node.name]), operation(node.op)
    if node.dtype in ("float64", "complex64", "complex128"):
        return "author", f"it computes in {node.dtype}, which no plan lowers", None
    setting, casts = how.setting(node.name), how.casts(node)
    inside = setting.in_region(node.region)
    if setting.autocast and not inside.autocast:
        return "author", "the author switches autocast off around it", None
    if inside.precision != setting.precision:
        return "author", f"the author runs it in {label(inside.precision)}, whatever the plan", None
    if told:
        return "author", f"the author asks for {given} here", None
    if casts.autocast in ("fp32", "fp32_unless_dtype"):
        return "strategy", f"{problem.strategy} runs {row.packet or node.op} in FP32 by itself", None
    if (source := _handed(resolution, node)) is None:
        return "author", f"it makes values of its own, in {given}", None
    if source in problem.capture.nodes:
        return "inherited", f"it is handed {given} by {source}", source
    place = next(p for p in problem.capture.placeholders if p.name == source)
    return "inherited", f"it is handed {given} by the {place.kind} {place.fqn or source}", place.fqn or source


def _handed(resolution: Resolution, node: Node) -> str | None:
    """The first that it reads of the dtype that it gives."""
    given = resolution.dtypes[node.name]
    return next((source for source in node.inputs if resolution.dtypes.get(source) == given), None)
