"""Records every path that the calibration batches take through a model, and joins the recordings in one graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from ..errors import CaptureError
from ..records import Batch, Call, Capture, ModelPath, Node, Placeholder, Subject
from .builder import Binder, RecordedModule
from .capture import record_path
from .paths import same_operations

MOST_PATHS = 8
"""Maximum number of recorded paths: each path takes a recording, and measurements on its batches."""


@dataclass(frozen=True)
class RecordedPaths:
    """The recorded runs of one model, one for each path through its operations; the first batch's path is first.
    unjudged: warnings about batches whose path is not recorded."""

    each: tuple[ModelPath, ...]
    unjudged: tuple[str, ...] = ()

    @property
    def first(self) -> ModelPath:
        """The ModelPath of the first batch."""
        return self.each[0]

    @property
    def operations(self) -> int:
        """Number of operations in all paths together."""
        return sum(len(path.capture.nodes) for path in self.each)


def record_paths(subject: Subject, formats: tuple[str, ...] = (), seed: int = 0) -> RecordedPaths:
    """Record the model's run on the first batch, and on each later batch with other shapes or another branch.

    Raises: CaptureError if the first batch cannot be recorded; for a later batch the result has a warning.
    """
    first = record_path(subject, formats, seed)
    paths = [first]
    unjudged = list[str]()
    recorded = [(_operations_in(first.capture), 1)]  # (operations of a path, its batch)
    taken = dict[int, frozenset[str]]()  # {batch: names before its path was recorded}
    left = _without(subject.batches, first.batches)
    while left and len(paths) < MOST_PATHS:
        number = number_of(subject, left[0])
        try:
            path = record_path(replace(subject, batches=tuple(left)), formats, seed)
        except CaptureError as error:
            unjudged.append(unjudged_line(number, error))
            left = left[1:]
            continue
        left = _without(left, path.batches)
        operations = _operations_in(path.capture)
        number = next((earlier for others, earlier in recorded if others == operations), number)
        recorded.append((operations, number))
        if number not in taken:
            taken[number] = _names_in(paths)
        paths.append(replace(path, capture=_named_apart(path.capture, number, taken[number])))
    most = f"an audit records at most {MOST_PATHS} paths"
    unjudged += [unjudged_line(number_of(subject, batch), most) for batch in left]
    return RecordedPaths(tuple(paths), tuple(unjudged))


def _names_in(paths: Iterable[ModelPath]) -> frozenset[str]:
    """Names of all operations and placeholders."""
    names = set[str]()
    for path in paths:
        names.update(path.capture.nodes)
        names.update(place.name for place in path.capture.placeholders)
    return frozenset(names)


def unjudged_line(number: int, cause: object) -> str:
    """The warning about a batch whose path cannot be recorded or measured."""
    why = str(cause).partition(". ")[0]
    return f"Batch {number} takes another path, which was not audited: {why}{'' if why.endswith(('.', '?')) else '.'}"


def number_of(subject: Subject, batch: Batch) -> int:
    """The number of a batch among the audited batches, from 1."""
    return next(number for number, other in enumerate(subject.batches, start=1) if other is batch)


def join_paths(paths: Sequence[ModelPath], warnings: Sequence[str] = ()) -> Capture:
    """One Capture with the operations of all paths; paths with the same operations appear once.

    The joined paths share only parameters and buffers.
    """
    captures = [path.capture for path in paths]
    first = captures[0]
    messages = list[str]()
    for capture in captures:
        messages += capture.warnings
    messages += warnings
    distinct = tuple(dict.fromkeys(messages))
    if len(paths) == 1:
        return replace(first, warnings=distinct) if warnings else first
    nodes: dict[str, Node] = {}
    placeholders: dict[str, Placeholder] = {}
    different = list[Capture]()  # the first capture of each set of operations
    for capture in captures:
        if capture.nodes.keys() - nodes.keys():
            different.append(capture)
            nodes |= capture.nodes
            for place in capture.placeholders:
                placeholders.setdefault(place.name, place)
    graph_module = first.graph_module
    if len(different) > 1:
        graph_module = RecordedModule(nn.Module(), _beside_each_other(different))
    return replace(
        first,
        graph_module=graph_module,
        nodes=nodes,
        placeholders=tuple(placeholders.values()),
        outputs=tuple(name for capture in different for name in capture.outputs),
        method="path" if any(capture.method == "path" for capture in captures) else "run",
        operations=max(capture.operations for capture in captures),
        compared=all(capture.compared for capture in captures),
        warnings=distinct,
        paths=tuple(paths),
        twins=_twins_among(different),
    )


def _twins_among(captures: Sequence[Capture]) -> dict[str, str]:
    """{operation or input of a later capture: the same one of an earlier capture}. If several earlier captures have
    it, the earliest counts."""
    twins: dict[str, str] = {}
    for index, later in enumerate(captures):
        for earlier in captures[:index]:
            by_argument = {place.argument: place.name for place in earlier.placeholders if place.argument is not None}
            same_inputs = dict[str, str]()
            for place in later.placeholders:
                if place.argument in by_argument:
                    same_inputs[place.name] = by_argument[place.argument]
            twins = same_operations(later, earlier) | same_inputs | twins
    return twins


def _without(batches: Sequence[Batch], others: Sequence[Batch]) -> list[Batch]:
    return [batch for batch in batches if not any(batch is other for other in others)]


def _operations_in(capture: Capture) -> list[object]:
    """A key for comparing captures: equal if they differ only in shapes and in numbers that depend on shapes."""
    nodes = [
        (n.name, n.op, n.owner, n.source, n.inputs, n.dtype, n.region, n.in_place, n.function, n.calls, n.returned)
        for n in capture.nodes.values()
    ]
    literals = [repr((n.literals, n.autocast_literals)) for n in capture.nodes.values()]
    return [nodes, literals, capture.placeholders, capture.outputs]


def _named_apart(capture: Capture, number: int, taken: Collection[str]) -> Capture:
    """Rename nodes whose names are `taken`, except parameters and buffers. number: the first batch recorded with these
    operations; batch 1 keeps all names."""
    if number == 1:
        return capture
    bind, shared = capture.bind, {place.name for place in capture.placeholders if place.fqn is not None}
    assert isinstance(bind, Binder)

    def rename(name: str) -> str:
        return name if name in shared or name not in taken else f"{name}_batch{number}"

    def rekey(key: str) -> str:
        return f"{key} in batch {number}"

    def separate(call: Call) -> Call:
        return replace(call, key=rekey(call.key))

    def describe(node: Node) -> Node:
        return replace(
            node,
            name=rename(node.name),
            inputs=tuple(map(rename, node.inputs)),
            calls=tuple(map(separate, node.calls)),
            returned=tuple(map(rekey, node.returned)),
            function=node.function and separate(node.function),
            batch=number,
        )

    graph = fx.Graph()
    graph.output(graph.graph_copy(capture.graph_module.graph, {}))
    for node in graph.nodes:
        if node.op != "output":
            node._rename(rename(node.name))
    return replace(
        capture,
        graph_module=RecordedModule(nn.Module(), graph),
        nodes={rename(name): describe(node) for name, node in capture.nodes.items()},
        placeholders=tuple(replace(place, name=rename(place.name)) for place in capture.placeholders),
        outputs=tuple(map(rename, capture.outputs)),
        bind=replace(
            bind, order=tuple(map(rename, bind.order)), constants={rename(key): x for key, x in bind.constants.items()}
        ),
    )


def _beside_each_other(captures: Sequence[Capture]) -> fx.Graph:
    """One graph that contains the graphs of all captures, with the placeholders first and without duplicates."""
    graph, ends, placed = fx.Graph(), list[fx.Node](), dict[str, fx.Node]()
    graphs = [capture.graph_module.graph for capture in captures]
    for node in (node for own in graphs for node in own.find_nodes(op="placeholder")):
        if node.name not in placed:
            placed[node.name] = graph.node_copy(node)
    for own in graphs:
        known = {node: placed[node.name] for node in own.find_nodes(op="placeholder")}
        ends += graph.graph_copy(own, known)  # type: ignore[arg-type]
    graph.output(tuple(ends))
    return graph
