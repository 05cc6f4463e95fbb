"""Everything low that can be: where FP32 values that the model makes itself would meet low weights, somebody stays FP32."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..replay.resolve import Resolution

if TYPE_CHECKING:
    from .problem import Problem

ROUNDS = 200
VISITS = 60_000
"""Times that owners are raised, one lot after the other, and operations looked at meanwhile, before the rest of the
conflicts is left standing."""


@dataclass(frozen=True)
class Lowest:
    """The lowest choice without conflicts. raised: {owner: nodes that would raise an error were it low}."""

    resolution: Resolution
    raised: Mapping[str, frozenset[str]]


def lowest(problem: Problem) -> Lowest:
    """Everything low but what cannot be together: either those that make the FP32 values, or those that meet them.

    Whichever leaves the lower price, and of equal ones the fewer.
    """
    return min(
        (_without_conflicts(problem, makers) for makers in (True, False)),
        key=lambda found: (len(found.resolution.conflicts) > 0, _price(problem, found), len(found.raised)),
    )


def _price(problem: Problem, found: Lowest) -> float:
    return sum(problem.node_price(name, found.resolution) for name in problem.capture.nodes)


def _without_conflicts(problem: Problem, makers: bool) -> Lowest:
    raised: dict[str, set[str]] = {}
    for _ in range(min(ROUNDS, max(VISITS // max(len(problem.capture.nodes), 1), 8))):
        resolution = problem.resolve(lambda owner: "fp32" if owner in raised else problem.format)
        wanted = {
            owner: first
            for first in _first_conflicts(problem, resolution)
            for owner in _blamed(problem, resolution, first, makers, raised)
        }
        if not wanted:
            break
        for owner, node in wanted.items():
            raised.setdefault(owner, set()).add(node)
    return Lowest(resolution, {owner: frozenset(nodes) for owner, nodes in raised.items()})


def _first_conflicts(problem: Problem, resolution: Resolution) -> list[str]:
    """Conflicts that no other one lies before: those behind may be its consequences."""
    behind, found = set[str](), []
    for name, node in problem.capture.nodes.items() if resolution.conflicts else ():
        tainted = any(source in behind for source in node.inputs)
        if name in resolution.conflicts and not tainted:
            found.append(name)
        if tainted or name in resolution.conflicts:
            behind.add(name)
    return found


def _blamed(problem: Problem, resolution: Resolution, name: str, makers: bool, known: Collection[str]) -> set[str]:
    """Owners to raise for one conflict, which are not among those that are."""
    nodes, known = problem.capture.nodes, set(known)
    if makers and (found := {nodes[origin].owner for origin in _origins(problem, resolution, name)} - known):
        return found
    return {nodes[name].owner} - known


def _origins(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """Operations at which the FP32 values begin that a node is handed in a low scope."""
    nodes, seen, found = problem.capture.nodes, set[str](), set[str]()
    waiting = [source for source in nodes[name].inputs if source in nodes]
    while waiting:
        source = waiting.pop()
        if source in seen or resolution.dtypes.get(source) != "fp32":
            continue
        seen.add(source)
        before = [each for each in nodes[source].inputs if each in nodes and resolution.dtypes.get(each) == "fp32"]
        waiting += before
        if not before:
            found.add(source)
    return found
