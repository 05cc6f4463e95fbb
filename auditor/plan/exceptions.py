"""Which functions a low module may keep in FP32: those that are unsafe or dear, where products beside them may run low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..execution.chosen import labelled
from ..numerics.operations import operation
from ..paths import of_function

if TYPE_CHECKING:
    from .problem import Problem


def exceptions_of(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: functions}, of modules whose own forward has products that are worth running low.

    Beside functions that are unsafe, a product that is dear in error may still run low; beside dear ones alone it need not.
    """
    safe, able = _products(problem, "safe"), _products(problem, "safe", "sensitive")
    found: dict[str, set[str]] = {}
    unsafe: dict[str, set[str]] = {}
    casts = set[str]()  # to what Python sees, which FP32 arguments would change
    for name, node in problem.capture.nodes.items():
        if node.function is None or node.owner not in able:
            continue
        verdict = _verdict(problem, name)
        if operation(node.op).cast and problem.format in problem.how.literals(node):
            casts.add(node.function.path)
        elif verdict != "safe":
            found.setdefault(node.owner, set()).add(node.function.path)
            if verdict != "sensitive":
                unsafe.setdefault(node.owner, set()).add(node.function.path)
    left = {
        owner: frozenset(names - casts)
        for owner, names in found.items()
        if safe.get(owner, set()) - names or (owner in unsafe and able[owner] - unsafe[owner])
    }
    for path in problem.lowest.raised:
        if (function := of_function(path)) is not None:
            left[function[0]] = left.get(function[0], frozenset()) | {function[1]}
    return {owner: names for owner, names in left.items() if names}


def needed(problem: Problem, precision: Mapping[str, str]) -> Mapping[str, str]:
    """A choice without the exceptions that change nothing: what a function is handed, or autocast, has it in FP32 anyhow."""
    kept, found = labelled(precision).keep, dict(precision)
    for path in sorted(precision):
        owner, name = of_function(path) or ("", "")
        if name in kept.get(owner, ()):
            without = {**found, path: found[owner]}
            if problem.resolve(labelled(without)) == problem.resolve(labelled(found)):
                found = without
    return found


def _products(problem: Problem, *verdicts: str) -> Mapping[str, set[str]]:
    """{module: functions that made its own products of these verdicts; "" for those that none made}."""
    found: dict[str, set[str]] = {}
    for name, node in problem.capture.nodes.items():
        if problem.costs[name].flops and operation(node.op).product and _verdict(problem, name) in verdicts:
            found.setdefault(node.owner, set()).add("" if node.function is None else node.function.path)
    return found


def _verdict(problem: Problem, name: str) -> str:
    """That of a node which a plan may lower; what autocast protects by itself, or the author runs low, is `safe` here."""
    verdict = problem.verdicts.get(name)
    lowered = name not in problem.kept and problem.lowest.resolution.touches_low(name)
    return verdict.verdict if verdict is not None and lowered else "safe"
