"""Which functions a low module may keep in FP32: those that are unsafe or dear, where products beside them may run low."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..ops.table import operation
from ..paths import of_function
from ..records import Node
from ..replay.chosen import labelled

if TYPE_CHECKING:
    from .problem import Problem

MOST_CALLS = 16
"""Calls of one function in a forward that are told apart: of more, a loop's for example, there may be others next time."""


def entries_of(node: Node) -> tuple[str, ...]:
    """What `keep` can call it: the function for all of its calls, and the one call that the node is part of."""
    if node.function is None:
        return ()
    name, numbers = node.function.path, node.function.numbers
    return (name, f"{name} {numbers[-1]} of {node.function.of}") if numbers else (name,)


def exceptions_of(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: functions, or single calls of them}, of modules whose own forward has products that are worth running low.

    Beside functions that are unsafe, a product that is dear in error may still run low; beside dear ones alone it need not.
    """
    single = _told_apart(problem)

    def entry(node: Node) -> str:
        all_and_one = entries_of(node)
        apart = bool(all_and_one) and (node.owner, all_and_one[0]) in single
        return "" if not all_and_one else all_and_one[-1] if apart else all_and_one[0]

    safe, able = _products(problem, entry, "safe"), _products(problem, entry, "safe", "sensitive")
    found: dict[str, set[str]] = {}
    unsafe: dict[str, set[str]] = {}
    casts = set[str]()  # to what Python sees, which FP32 arguments would change
    for name, node in problem.capture.nodes.items():
        if node.function is None or node.owner not in able:
            continue
        verdict = _verdict(problem, name)
        if operation(node.op).cast and problem.format in problem.how.literals(node):
            casts.add(entry(node))
        elif verdict != "safe":
            found.setdefault(node.owner, set()).add(entry(node))
            if verdict != "sensitive":
                unsafe.setdefault(node.owner, set()).add(entry(node))
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


def _told_apart(problem: Problem) -> set[tuple[str, str]]:
    """(module, function) of which calls are named one by one: products of that name, here or further in, differ in verdict."""
    verdicts: dict[tuple[str, str], set[str]] = {}
    most: dict[tuple[str, str], int] = {}
    for name, node in problem.capture.nodes.items():
        if node.function is None or not node.function.numbers:
            continue
        most[node.owner, node.function.path] = node.function.of
        if problem.costs[name].flops and operation(node.op).product:
            for owner in {call.path for call in node.calls}:
                verdicts.setdefault((owner, node.function.path), set()).add(_verdict(problem, name))
    return {
        place for place, found in verdicts.items() if len(found) > 1 and most.get(place, MOST_CALLS + 1) <= MOST_CALLS
    }


def _products(problem: Problem, entry: Callable[[Node], str], *verdicts: str) -> Mapping[str, set[str]]:
    """{module: what names its own products of these verdicts; "" for those that no function of torch made}."""
    found: dict[str, set[str]] = {}
    for name, node in problem.capture.nodes.items():
        if problem.costs[name].flops and operation(node.op).product and _verdict(problem, name) in verdicts:
            found.setdefault(node.owner, set()).add(entry(node))
    return found


def _verdict(problem: Problem, name: str) -> str:
    """That of a node which a plan may lower; what autocast protects by itself, or the author runs low, is `safe` here."""
    verdict = problem.verdicts.get(name)
    lowered = name not in problem.kept and problem.lowest.resolution.touches_low(name)
    return verdict.verdict if verdict is not None and lowered else "safe"
