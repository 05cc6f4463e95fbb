"""The terms of a problem's energy: what each scope costs low and in FP32, and what values between scopes do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.table import operation
from ..paths import function_in, nearest_above
from ..records import Capture
from ..replay.nesting import owners_of, readers_of
from ..replay.resolve import Resolution
from ..replay.strategies import plain
from .energy import FORBIDDEN, Energy

if TYPE_CHECKING:
    from .problem import Problem


def timed_in(resolution: Resolution, name: str) -> str:
    """Precision a node is timed in; discrete ones move as many bytes either way."""
    return resolution.computed(name) or "fp32"


def energy_of(problem: Problem) -> Energy:
    """The energy of a problem, its terms taken where everything is low that can be, and where everything is FP32."""
    lowest, raised = problem.lowest, problem.resolve(plain("fp32"))
    resolution, held = lowest.resolution, lowest.raised
    nodes, users = problem.capture.nodes, _users(problem.capture)
    functions = [function_in(owner, name) for owner, names in problem.exceptions.items() for name in sorted(names)]
    scopes = dict.fromkeys((*owners_of(problem.capture, problem.how), *functions), (0.0, 0.0, 0.0))
    decides = {name: problem.variable(name) for name in nodes}

    def charge(owner: str, low: float, high: float, error: float) -> None:
        a, b, c = scopes[owner]
        scopes[owner] = (a + low, b + high, c + error)

    pairs: dict[tuple[str, str], tuple[float, float]] = {}

    def exchange(producer: str, consumer: str, value: str) -> None:
        error, elapsed = pairs.get((producer, consumer), (0.0, 0.0))
        square = problem.cast_square(resolution, value)
        pairs[producer, consumer] = (error + square, elapsed + problem.cast_price(value))

    stores = problem.how.stores
    entering = {p.name for p in problem.capture.placeholders if p.kind == "input" and p.kind in stores}
    for name, node in nodes.items():
        low, high = (problem.node_price(name, each) for each in (resolution, raised))
        charge(decides[name], low, high, problem.node_square(resolution, name))
        if resolution.low(name) or (node.floating and (node.owner in held or decides[name] in held)):
            for consumer in {decides[user] for user in users.get(name, ())} - {decides[name]}:
                exchange(decides[name], consumer, name)
    for owner in held:
        charge(owner, 0.0, 0.0, FORBIDDEN)
    for name in problem.rounded_values(resolution):
        if name in nodes and (nodes[name].owner in held or decides[name] in held):
            continue  # the pairs have it
        casting = resolution.lowered.get(name) or _past_views(problem.capture, users, name) or users.get(name, [])
        maker = decides.get(name, "")  # the graph's output is in no scope: the one that hands the value on casts it
        readers = {decides.get(user, maker) for user in casting}
        if name in entering:  # the root rounds its inputs; if it does not, the scopes that read them do
            charge("", 0.0, 0.0, problem.cast_square(resolution, name))
            for owner in readers - {""}:
                exchange("", owner, name)
            continue
        for owner in readers:
            charge(owner, 0.0, 0.0, problem.cast_square(resolution, name) / len(readers))
    if problem.byte_price:
        for name, owners in readers_of(problem.capture).items():
            low, high = (problem.stored_price(name, precision) for precision in (problem.format, "fp32"))
            for owner in owners if resolution.low(name) else ():
                charge(owner, low / len(owners), high / len(owners), 0.0)
    tree = {owner: above for owner in scopes if (above := nearest_above(owner, scopes)) is not None}
    return Energy(scopes, pairs, tree, *_tied(problem), problem.island, _shielded(problem) | set(functions))


def _users(capture: Capture) -> dict[str, list[str]]:
    """{value: nodes that read it}."""
    found: dict[str, list[str]] = {}
    for node in capture.nodes.values():
        for source in node.inputs:
            found.setdefault(source, []).append(node.name)
    return found


def _past_views(capture: Capture, users: dict[str, list[str]], name: str) -> list[str]:
    """Nodes that compute with a weight, buffer or input, views of it passed by."""
    waiting, seen = list(users.get(name, ())), dict[str, None]()
    while waiting:
        reader = waiting.pop()
        if reader not in seen:
            seen[reader] = None
            waiting += users.get(reader, ()) if operation(capture.nodes[reader].op).view else ()
    return [reader for reader in seen if not operation(capture.nodes[reader].op).view]


def _shielded(problem: Problem) -> frozenset[str]:
    """Owners all of whose operations lie in regions where the author switches autocast off before calling them."""
    if not problem.how.regional:
        return frozenset()
    nodes = problem.capture.nodes.values()
    free = {n.owner for n in nodes if n.region is None or n.region.enabled or len(n.calls) <= n.region.depth}
    return frozenset({node.owner for node in nodes} - free)


def _tied(problem: Problem) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """What one precision of each tensor that the strategy stores asks of scopes.

    First those that read one: they share theirs. Then each that reads one with each that merely holds it.
    """
    kinds = problem.how.stores - {"input"}
    readers, tied, held = readers_of(problem.capture), set[tuple[str, str]](), set[tuple[str, str]]()
    for place in problem.capture.placeholders:
        if place.kind in kinds and place.name in readers:
            first, *others = readers[place.name]
            tied |= {(first, other) for other in others}
            held |= {(first, holder) for holder in place.holders if place.tied and holder not in readers[place.name]}
    return tied, held
