"""Which functions a low module may keep in FP32: those that are unsafe or dear, where products beside them may run low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..ops.table import operation
from ..paths import enclosing

if TYPE_CHECKING:
    from .problem import Problem


def exceptions_of(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: names of functions}, of modules in or below which there are products that are worth running low."""
    worthy = _with_products(problem)
    found: dict[str, set[str]] = {}
    for name, node in problem.capture.nodes.items():
        if node.function is not None and node.owner in worthy and _troubles(problem, name):
            found.setdefault(node.owner, set()).add(node.function.path)
    casts = {n.function.path for n in problem.capture.nodes.values() if n.function is not None and operation(n.op).cast}
    found = {owner: names - casts for owner, names in found.items() if names - casts}  # a cast says what it gives
    return {owner: frozenset(names) for owner, names in found.items() if worthy[owner] - names}


def _with_products(problem: Problem) -> Mapping[str, set[str]]:
    """{module: functions whose products are safe low, in it or below; "" for those that no function of torch made}."""
    found: dict[str, set[str]] = {}
    for name, node in problem.capture.nodes.items():
        if problem.costs[name].flops and operation(node.op).product and not _troubles(problem, name):
            for path in enclosing(node.owner):
                called = node.function.path if node.function is not None and path == node.owner else ""
                found.setdefault(path, set()).add(called)
    return found


def _troubles(problem: Problem, name: str) -> bool:
    """Whether a node that a plan may lower is unsafe low, or dear in error; what autocast protects by itself is not lowered."""
    verdict = problem.verdicts.get(name)
    troubles = name not in problem.kept and verdict is not None and verdict.verdict != "safe"
    return troubles and problem.lowest.resolution.touches_low(name)
