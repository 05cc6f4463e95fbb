"""What can be low together: everything but what would meet FP32 beside low weights, and functions that low modules may keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..execution.policy import choice_keeping
from ..execution.resolve import Resolution
from ..numerics.operations import operation
from ..paths import function_in, module_of, of_function
from .mincut import Choice

if TYPE_CHECKING:
    from .problem import Problem


@dataclass(frozen=True)
class Lowest:
    """The lowest choice without conflicts. raised: modules, and functions in some, at which one would be were they low."""

    resolution: Resolution
    raised: frozenset[str]


def find_lowest(problem: Problem) -> Lowest:
    """Everything low but what cannot be together: those that make the FP32 values, those that meet them, or one function.

    Whichever leaves the lower price, and of equal ones the fewer.
    """

    def rank(found: Lowest) -> tuple[bool, float, int]:
        price = sum(problem.node_price(name, found.resolution) for name in problem.capture.nodes)
        return bool(found.resolution.conflicts), price, len(found.raised)

    return min(
        (_without_conflicts(problem, blamed) for blamed in (_makers, _function, lambda *_: set[str]())), key=rank
    )


def _without_conflicts(problem: Problem, blamed: Callable[[Problem, Resolution, str], set[str]]) -> Lowest:
    """blamed: what to raise for the conflict of one node; nothing, or what is raised already: the module that meets FP32."""
    raised, nodes = set[str](), problem.capture.nodes
    while True:
        resolution = problem.resolve(choice_keeping(raised, problem.format))
        firsts = _first_conflicts(problem, resolution)
        wanted = {
            p for name in firsts for p in blamed(problem, resolution, name) - raised or {nodes[name].owner} - raised
        }
        if not wanted:
            return Lowest(resolution, frozenset(raised))
        raised |= wanted


def _first_conflicts(problem: Problem, resolution: Resolution) -> list[str]:
    """Conflicts that no other one lies before: those behind may be its consequences."""
    behind, result = set[str](), []
    for name, node in problem.capture.nodes.items() if resolution.conflicts else ():
        tainted = any(source in behind for source in node.inputs)
        if name in resolution.conflicts and not tainted:
            result.append(name)
        if tainted or name in resolution.conflicts:
            behind.add(name)
    return result


def _makers(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """Modules that make the FP32 values."""
    nodes, chain = problem.capture.nodes, _chain(problem, resolution, name)
    return {nodes[each].owner for each in chain if not any(before in chain for before in nodes[each].inputs)}


def _function(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """A function that gives FP32 anyhow, in the innermost module around the node that calls one.

    A scope that keeps a function runs its products low again, whatever they are handed; it has to keep one to do so.
    """
    nodes, chain = problem.capture.nodes, _chain(problem, resolution, name)
    giving = [each for each in nodes if each in chain and _entry(problem, each) and not problem.how.regional]
    for call in reversed(nodes[name].calls):
        if (first := next((each for each in giving if nodes[each].owner == call.path), None)) is not None:
            return {function_in(call.path, _entry(problem, first))}
    return set()


def _entry(problem: Problem, name: str) -> str:
    """What `keep` calls the function that a node is part of; "" for one that says itself what it gives."""
    node = problem.capture.nodes[name]
    return "" if node.function is None or operation(node.op).cast else node.function.path


def _chain(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """Operations that make the FP32 values that a node is handed in a low scope."""
    nodes, result = problem.capture.nodes, set[str]()
    waiting = list(nodes[name].inputs)
    while waiting:
        source = waiting.pop()
        if source in nodes and source not in result and resolution.dtypes.get(source) == "fp32":
            result.add(source)
            waiting += nodes[source].inputs
    return result


def find_exceptions(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: functions}, of modules whose own forward has products that are worth running low.

    Beside functions that are unsafe, a product that is dear in error may still run low; beside dear ones alone it need not.
    """
    products, functions = dict[tuple[str, str], set[str]](), dict[tuple[str, str], set[str]]()  # by module and verdict
    casts = dict[str, set[str]]()  # to what Python sees, which FP32 arguments would change
    for name, node in problem.capture.nodes.items():
        place, path = (node.owner, _verdict(problem, name)), node.function.path if node.function else ""
        if problem.costs[name].flops and operation(node.op).product:
            products.setdefault(place, set()).add(path)
        if node.function and operation(node.op).cast and problem.format in problem.how.literals(node):
            casts.setdefault(node.owner, set()).add(path)
        elif node.function:
            functions.setdefault(place, set()).add(path)
    result = dict[str, frozenset[str]]()
    able = dict.fromkeys(owner for owner, verdict in products if verdict in ("safe", "sensitive"))
    never = set().union(*(casts.get(owner, ()) for owner in able))
    for owner in able:
        safe, dear = (products.get((owner, verdict), set()) for verdict in ("safe", "sensitive"))
        unsafe = set().union(*(functions.get((owner, verdict), ()) for verdict in ("unsafe", "untested")))
        kept = unsafe | functions.get((owner, "sensitive"), set())
        if safe - kept or (unsafe and (safe | dear) - unsafe):
            result[owner] = frozenset(kept - never)
    for path in problem.lowest.raised:
        if (function := of_function(path)) is not None:
            result[function[0]] = result.get(function[0], frozenset()) | {function[1]}
    return {owner: names for owner, names in result.items() if names}


def without_idle(problem: Problem, high: Choice) -> Choice:
    """A choice without the exceptions that change nothing: what a function is handed, or autocast, has it in FP32 anyhow."""
    for path in sorted(high):
        if path != module_of(path) and module_of(path) not in high:
            without, both = (problem.resolve(choice_keeping(x, problem.format)) for x in (high - {path}, high))
            high = high - {path} if without == both else high
    return high


def _verdict(problem: Problem, name: str) -> str:
    """That of a node which a plan may lower; what autocast protects by itself, or the author runs low, is `safe` here."""
    verdict = problem.verdicts.get(name)
    lowered = name not in problem.kept and problem.lowest.resolution.touches_low(name)
    return verdict.verdict if verdict is not None and lowered else "safe"
