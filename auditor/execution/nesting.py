"""Which module calls enclose every operation, and what the wrapped ones among them do to the values that pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..numerics.formats import is_low
from ..numerics.nodes import dtype
from ..paths import enclosing, function_in, nearest, nearest_above, within
from ..records import Call, Capture
from .chosen import Chosen, kept_functions

Steps = tuple[str, ...]
"""Precisions a value is converted to, one after the other."""


@dataclass(frozen=True)
class Boundary:
    """A module whose forward is wrapped. entry, exit: precision that what goes in, and comes out, is converted to.

    exit "input": that of whatever calls it, since its callers differ. keep: functions that stay FP32 in a low one.
    """

    precision: str
    keeps: bool
    entry: str | None
    exit: str | None
    keep: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layout:
    """What all ways to run one capture under a strategy have in common.

    owners: see `owners_of`; outermost: the same, those above others first. left: {owner: what the values that its nodes
    read have come out of}, itself and those above it not among them. deciding: see `deciders_of`. low: see `stored_low`.
    """

    owners: tuple[str, ...]
    outermost: tuple[str, ...]
    left: Mapping[str, frozenset[str]]
    deciding: Mapping[str, tuple[str, ...]]
    low: frozenset[str]


def layout_of(capture: Capture, how: Strategy) -> Layout:
    """Looked up once for many runs."""
    owners, nodes = owners_of(capture, how), capture.nodes
    outermost = sorted(owners, key=lambda path: (path.count(".") + bool(path), path))
    between = {
        (nodes[source].owner, node.owner) for node in nodes.values() for source in node.inputs if source in nodes
    }
    left: dict[str, set[str]] = {}
    for producer, reader in between:
        left.setdefault(reader, set()).update(path for path in enclosing(producer) if not within(reader, path))
    return Layout(
        owners,
        tuple(outermost),
        {reader: frozenset(paths) for reader, paths in left.items()},
        deciders_of(capture),
        stored_low(capture),
    )


def boundaries(
    capture: Capture, strategy: str, precision_of: Callable[[str], str], layout: Layout | None = None
) -> dict[str, Boundary]:
    """The root, and every owner whose precision differs from that of the owner above it, as a plan wraps them.

    What they convert is what the strategy's runtime does.
    """
    how, keep = strategy_of(strategy), kept_functions(precision_of)
    layout = layout or layout_of(capture, how)
    precision_of = agreed(capture, layout.owners, precision_of)
    precisions: dict[str, str] = {}
    above: dict[str, str | None] = {"": None}
    for owner in layout.outermost:
        listed = (nearest_above(path, precisions) for path in (owner, *capture.aliases.get(owner, ())))
        callers = {None if path is None else precisions[path] for path in listed}
        if callers != {precision_of(owner)} or (owner in keep and precision_of(owner) != "fp32"):
            precisions[owner], above[owner] = precision_of(owner), callers.pop() if len(callers) == 1 else "input"
    keeping = _keeping(layout, precisions, precision_of)
    found = {}
    for path, precision in precisions.items():
        keeps = path in keeping
        kept = keep.get(path, frozenset()) if precision != "fp32" else frozenset()
        found[path] = Boundary(precision, keeps, *how.boundary(precision, above[path], keeps), kept)
    return found


def agreed(capture: Capture, owners: Iterable[str], precision_of: Callable[[str], str]) -> Chosen:
    """The precision of every owner; a module that has several paths, in scopes that differ, is FP32."""
    known, found = frozenset(owners), dict[str, str]()

    def precision(owner: str) -> str:
        if owner not in found:
            found[owner] = together(owner)
        return found[owner]

    def together(owner: str) -> str:
        paths = (owner, *(nearest(path, known) or "" for path in capture.aliases.get(owner, ())))
        asked = [precision_of(path) for path in paths]
        return "fp32" if "fp32" in asked else asked[0]

    return Chosen(precision, kept_functions(precision_of))


def owners_of(capture: Capture, how: Strategy) -> tuple[str, ...]:
    """Modules whose precision is up for choice: the root, those of the operations, and those that hold a stored tied weight.

    Of the last some may never be called: their precision decides how the weight is stored, as any holder's does.
    """
    tied = (path for place in capture.placeholders if place.tied and place.kind in how.stores for path in place.holders)
    return tuple(dict.fromkeys(("", *(node.owner for node in capture.nodes.values()), *tied)))


def stored_low(capture: Capture) -> frozenset[str]:
    """Parameters and buffers that were low when the model was recorded: the author's own, which no plan converts."""
    state = {place.name for place in capture.placeholders if place.kind in ("parameter", "buffer")}
    nodes = [node for node in capture.graph_module.graph.nodes if node.op == "placeholder" and node.name in state]
    return frozenset(node.name for node in nodes if (held := dtype(node)) is not None and is_low(held))


def readers_of(capture: Capture) -> dict[str, tuple[str, ...]]:
    """{placeholder: owners of the nodes that read it}."""
    names = {placeholder.name for placeholder in capture.placeholders}
    readers: dict[str, dict[str, None]] = {}
    for node in capture.nodes.values():
        for source in node.inputs:
            if source in names:
                readers.setdefault(source, {})[node.owner] = None
    return {name: tuple(owners) for name, owners in readers.items()}


def deciders_of(capture: Capture) -> dict[str, tuple[str, ...]]:
    """{placeholder: owners that share in deciding how it is stored}: those that read it, and all that hold a tied one."""
    held = {place.name: place.holders for place in capture.placeholders if place.tied}
    readers = readers_of(capture)
    return {name: tuple(dict.fromkeys((*owners, *held.get(name, ())))) for name, owners in readers.items()}


def _keeping(layout: Layout, precisions: Mapping[str, str], precision_of: Callable[[str], str]) -> set[str]:
    """FP32 scopes whose results are read by FP32 scopes alone, or are outputs of the model: they stay FP32."""
    handed_low: set[str] = set()
    for reader, paths in layout.left.items() if "fp32" in precisions.values() else ():
        if precision_of(reader) != "fp32":
            handed_low |= paths
    return {path for path, precision in precisions.items() if precision == "fp32" and path not in handed_low}


KEPT = function_in("", "")
"""The path of calls of functions that a scope keeps in FP32."""

_IN_FP32 = Boundary("fp32", False, "fp32", None)


class Passage:
    """What happens to values on their way from the operation that makes them to one that reads them.

    A value leaves every wrapped call that encloses its producer and not its reader, innermost first, and enters those
    that enclose its reader alone. Inputs of the model come from outside of the root; weights pass no boundary. A function
    that a scope keeps raises what it is given, weights too, and hands on what it computed.
    """

    def __init__(self, capture: Capture, wrapped: Mapping[str, Boundary]) -> None:
        self._nodes, self._wrapped = capture.nodes, {**wrapped, KEPT: _IN_FP32}
        self._kept_in = {path: boundary.keep for path, boundary in wrapped.items() if boundary.keep}
        self._functions: dict[str, tuple[Call, ...]] = {}
        self._inputs = {p.name: () for p in capture.placeholders if p.kind == "input"}
        self._kept: dict[tuple[Call, ...], tuple[Call, ...]] = {}
        self._around: dict[str, tuple[Call, ...]] = {}
        self._between: dict[tuple[int, int], Steps] = {}

    def steps(self, source: str, reader: str) -> Steps:
        """Conversions between two nodes of the graph; the graph's output lies outside of the root."""
        if source not in self._nodes and source not in self._inputs:
            return ("fp32",) if self.keeps(reader) else ()
        left, entered = self.enclosing(source), self.enclosing(reader)
        key = id(left), id(entered)  # each is held here once, and comparing calls takes time
        if key not in self._between:
            self._between[key] = self._convert(left, entered)
        return self._between[key]

    def enclosing(self, name: str) -> tuple[Call, ...]:
        """Wrapped calls around a node, outermost first."""
        if name not in self._around:
            calls = self._nodes[name].calls if name in self._nodes else ()
            if calls not in self._kept:
                self._kept[calls] = tuple(call for call in calls if call.path in self._wrapped)
            self._around[name] = self._with_function(name, self._kept[calls])
        return self._around[name]

    def keeps(self, name: str) -> bool:
        """Whether a node is part of a call that a scope around it keeps in FP32."""
        return bool(self._kept_in) and bool(around := self.enclosing(name)) and around[-1].path == KEPT

    def _with_function(self, name: str, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        function = self._nodes[name].function if self._kept_in and name in self._nodes else None
        if function is None or not any(function.path in self._kept_in.get(call.path, ()) for call in calls):
            return calls
        if function.key not in self._functions:
            self._functions[function.key] = (*calls, Call(KEPT, function.depth, function.key))
        return self._functions[function.key]

    def _convert(self, source: tuple[Call, ...], reader: tuple[Call, ...]) -> Steps:
        shared = 0
        while shared < min(len(source), len(reader)) and source[shared] == reader[shared]:
            shared += 1
        left = [self._exit(source, index) for index in reversed(range(shared, len(source)))]
        entered = (self._wrapped[call.path].entry for call in reader[shared:])
        return tuple(step for step in (*left, *entered) if step is not None)

    def _exit(self, calls: tuple[Call, ...], index: int) -> str | None:
        handed_on = self._wrapped[calls[index].path].exit
        return self._wrapped[calls[index - 1].path].precision if handed_on == "input" else handed_on
