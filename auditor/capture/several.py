"""Every path that the calibration batches take through a model, a recording each, and all of them as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from ..errors import CaptureError
from ..records import Batch, Call, Capture, ModelPath, Node, Placeholder, Subject
from .binding import Binder, TapeModule
from .capture import Recording, recorded
from .paths import usable_batches
from .places import places_of

MOST_PATHS = 8
"""Paths that are recorded: each costs a recording, and the measuring of its batches."""

_TOO_MANY = f"an audit records {MOST_PATHS} paths"

Names = Mapping[str, str]
"""{name in a recording: name in the graph of all paths}."""


@dataclass(frozen=True)
class Recordings:
    """A recording of each path, its subject with the batches that take it; the first batch's is the first.

    unjudged: sentences on batches whose path is not among them.
    """

    each: tuple[Recording, ...]
    unjudged: tuple[str, ...] = ()

    @property
    def first(self) -> Recording:
        """That of the first batch."""
        return self.each[0]

    @property
    def operations(self) -> int:
        """How many there are in all of them together."""
        return sum(len(recording.capture.nodes) for recording in self.each)


def record_paths(subject: Subject, formats: tuple[str, ...] = (), seed: int = 0) -> Recordings:
    """Record the first batch, and each later one that is of other shapes than those before it or takes another branch.

    Raises: CaptureError where the first batch cannot be recorded; of another one that is said.
    """
    first = recorded(subject, formats, seed)
    left = _without(subject.batches, usable_batches(first.capture, subject))
    if not left:
        return Recordings((first,))
    each, unjudged = [_of_its_batches(first)], list[str]()
    known: list[_Known] = [_Known(first.capture, {}, 1)]
    while left and len(each) < MOST_PATHS:
        number = number_of(subject, left[0])
        try:
            found = _of_its_batches(recorded(replace(subject, batches=tuple(left)), formats, seed))
        except CaptureError as error:
            unjudged.append(unjudged_line(number, error))
            left = left[1:]
            continue
        left = _without(left, found.subject.batches)
        each.append(replace(found, capture=_named_apart(found.capture, number, known)))
    if left:
        unjudged += [unjudged_line(number_of(subject, batch), _TOO_MANY) for batch in left]
    return Recordings(tuple(each), tuple(unjudged))


def unjudged_line(number: int, cause: object) -> str:
    """The sentence on a batch whose path cannot be recorded or measured."""
    why = str(cause).partition(". ")[0]
    return (
        f"Batch {number} takes a path of its own, which was not judged: {why}{'' if why.endswith(('.', '?')) else '.'}"
    )


def number_of(subject: Subject, batch: Batch) -> int:
    """Which of a subject's batches it is, counted from 1."""
    return next(number for number, other in enumerate(subject.batches, start=1) if other is batch)


def join_paths(recordings: Sequence[Recording], warnings: Sequence[str] = ()) -> Capture:
    """One graph that holds each path beside the others; of those that run the same operations, the first.

    They share parameters and buffers. What one path computes reads nothing of another.
    """
    paths = tuple(ModelPath(one.capture, one.subject.batches, one.answer.names) for one in recordings)
    first, *_ = captures = [path.capture for path in paths]
    said = dict.fromkeys((*(line for capture in captures for line in capture.warnings), *warnings))
    if len(paths) == 1:
        return replace(first, warnings=tuple(said)) if warnings else first
    nodes: dict[str, Node] = {}
    placeholders: dict[str, Placeholder] = {}
    apart = list[Capture]()
    for capture in captures:
        if capture.nodes.keys() - nodes.keys():
            apart.append(capture)
            nodes |= capture.nodes
            placeholders |= {p.name: p for p in capture.placeholders if p.name not in placeholders}
    return replace(
        first,
        graph_module=first.graph_module if len(apart) == 1 else TapeModule(nn.Module(), _beside_each_other(apart)),
        nodes=nodes,
        placeholders=tuple(placeholders.values()),
        outputs=tuple(name for capture in apart for name in capture.outputs),
        method="path" if any(capture.method == "path" for capture in captures) else "run",
        operations=max(capture.operations for capture in captures),
        compared=all(capture.compared for capture in captures),
        warnings=tuple(said),
        paths=paths,
        twins=_twins(apart),
    )


def _of_its_batches(recording: Recording) -> Recording:
    """The recording, its subject with none but the batches that take its path."""
    taken = usable_batches(recording.capture, recording.subject)
    return replace(recording, subject=replace(recording.subject, batches=tuple(taken)))


def _without(batches: Sequence[Batch], others: Sequence[Batch]) -> list[Batch]:
    return [batch for batch in batches if not any(batch is other for other in others)]


@dataclass(frozen=True)
class _Known:
    """A recorded capture, its names in the whole, and the number of the batch that it was recorded in."""

    capture: Capture
    names: Names
    number: int


def _named_apart(capture: Capture, number: int, known: list[_Known]) -> Capture:
    """The capture with names that no other path has; those of a known one that runs the same operations.

    known: all before, to which this one is added. number: of the batch that it was recorded in.
    """
    for other in known:
        if _operations_in(capture) == _operations_in(other.capture):
            return _renamed(capture, other.names, other.number) if other.names else capture
    taken: dict[str, Placeholder | None] = {}
    for other in known:
        taken |= {other.names.get(place.name, place.name): place for place in other.capture.placeholders}
        taken |= dict.fromkeys((other.names.get(name, name) for name in other.capture.nodes), None)
    shared = {p.fqn: name for name, p in reversed(taken.items()) if p is not None and p.fqn is not None}
    names = {p.name: shared[p.fqn] for p in capture.placeholders if p.fqn in shared}
    for name in (*(place.name for place in capture.placeholders), *capture.nodes):
        if name not in names:
            names[name] = _free(name, number, {*taken, *names.values()})
    known.append(_Known(capture, names, number))
    return _renamed(capture, names, number)


def _free(name: str, number: int, taken: set[str]) -> str:
    while name in taken:
        name = f"{name}_batch{number}"
    return name


def _operations_in(capture: Capture) -> list[object]:
    """All that the stages read of a recording but numbers that depend on the shapes: equal for the same operations."""
    nodes = [
        (n.name, n.op, n.owner, n.source, n.inputs, n.dtype, n.region, n.in_place, n.function, n.calls)
        for n in capture.nodes.values()
    ]
    literals = [repr((n.literals, n.autocast_literals)) for n in capture.nodes.values()]
    return [nodes, literals, capture.placeholders, capture.outputs]


def _renamed(capture: Capture, names: Names, number: int) -> Capture:
    """The same recording under other names. number: of the batch that its operations are recorded in."""
    graph = fx.Graph()
    copies = _copied(graph, capture.graph_module.graph.nodes, lambda name: names.get(name, name))
    graph.output(tuple(copies[name] for name in capture.outputs))
    bind, calls = capture.bind, dict[int, tuple[Call, ...]]()
    assert isinstance(bind, Binder)

    def named(name: str) -> str:
        return names.get(name, name)

    def describe(node: Node) -> Node:
        around = calls.setdefault(id(node.calls), tuple(_apart(call, number) for call in node.calls))
        function = node.function and _apart(node.function, number)
        reads = tuple(map(named, node.inputs))
        return replace(node, name=named(node.name), inputs=reads, calls=around, function=function, batch=number)

    return replace(
        capture,
        graph_module=TapeModule(nn.Module(), graph),
        nodes={named(name): describe(node) for name, node in capture.nodes.items()},
        placeholders=tuple(replace(place, name=named(place.name)) for place in capture.placeholders),
        outputs=tuple(map(named, capture.outputs)),
        bind=replace(
            bind,
            order=tuple(map(named, bind.order)),
            names={named(name): path for name, path in bind.names.items()},
            constants={named(name): x for name, x in bind.constants.items()},
        ),
    )


def _apart(call: Call, number: int) -> Call:
    """The call of another path's run: no call of this one is the same."""
    return replace(call, key=f"{call.key} in batch {number}")


def _copied(graph: fx.Graph, nodes: Iterable[fx.Node], named: Callable[[str], str]) -> dict[str, fx.Node]:
    """The nodes but the output at the end of a graph, by their old names; those of its names already are not copied."""
    known = {node.name: node for node in graph.nodes}
    copies: dict[str, fx.Node] = {}
    for node in nodes:
        name = named(node.name)
        if node.op == "output":
            continue
        if name not in known:
            known[name] = graph.create_node(node.op, name if node.op == "placeholder" else node.target, name=name)
            known[name].args, known[name].kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda source: copies[source.name]
            )
            known[name].meta = dict(node.meta)
            assert known[name].name == name
        copies[node.name] = known[name]
    return copies


def _beside_each_other(captures: Sequence[Capture]) -> fx.Graph:
    """One graph of all, placeholders first, each of them once."""
    graph, ends = fx.Graph(), list[fx.Node]()
    for capture in captures:
        _copied(graph, capture.graph_module.graph.find_nodes(op="placeholder"), str)
    for capture in captures:
        copies = _copied(graph, capture.graph_module.graph.nodes, str)
        ends += [copies[name] for name in capture.outputs]
    graph.output(tuple(ends))
    return graph


def _twins(captures: Sequence[Capture]) -> dict[str, str]:
    """{operation of a later path: the same one of an earlier path}, by module, name, line and turn; of inputs, by argument."""
    known: dict[object, str] = {}
    found: dict[str, str] = {}
    for capture in captures:
        inputs = {p.argument: p.name for p in capture.placeholders if p.kind == "input" and p.argument is not None}
        for place, name in (*places_of(capture).items(), *inputs.items()):
            if (first := known.setdefault(place, name)) != name:
                found[name] = first
    return found
