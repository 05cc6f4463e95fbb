"""Which functions a low module may keep in FP32: those that are unsafe or dear, where products beside them may run low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..ops.table import operation

if TYPE_CHECKING:
    from .problem import Problem


def exceptions_of(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: names of functions}, of modules whose own forward has products that are worth running low."""
    worthy = _with_products(problem)
    found: dict[str, set[str]] = {}
    casts = set[str]()  # these say themselves what they give
    for name, node in problem.capture.nodes.items():
        if node.function is None or node.owner not in worthy:
            continue
        if operation(node.op).cast:
            casts.add(node.function.path)
        elif _troubles(problem, name):
            found.setdefault(node.owner, set()).add(node.function.path)
    left = {owner: frozenset(names - casts) for owner, names in found.items() if worthy[owner] - names}
    return {owner: names for owner, names in left.items() if names}


def _with_products(problem: Problem) -> Mapping[str, set[str]]:
    """{module: functions of its own whose products are safe low; "" for those that no function of torch made}."""
    found: dict[str, set[str]] = {}
    for name, node in problem.capture.nodes.items():
        if problem.costs[name].flops and operation(node.op).product and not _troubles(problem, name):
            found.setdefault(node.owner, set()).add(node.function.path if node.function is not None else "")
    return found


def _troubles(problem: Problem, name: str) -> bool:
    """Whether a node that a plan may lower is unsafe low, or dear in error; what autocast protects by itself is not lowered."""
    verdict = problem.verdicts.get(name)
    troubles = name not in problem.kept and verdict is not None and verdict.verdict != "safe"
    return troubles and problem.lowest.resolution.touches_low(name)
