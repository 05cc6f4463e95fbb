"""Which dtype every node would really run in under a set of scope precisions, computed without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..numerics.carried import asked_for
from ..numerics.formats import FORMATS, Format
from ..numerics.nodes import tensors_of
from ..numerics.operations import operation
from ..numerics.rounded import promoted
from ..records import Capture, Literals
from .running import Casts, Running


def is_low(name: str) -> bool:
    """Whether it is the name of a low format: not of a wider one, nor "" as for what is discrete."""
    row = FORMATS.get(name)
    return row is not None and row.low


@dataclass(frozen=True)
class Resolution:
    """dtypes: {node or placeholder: the name of a format, or "" for discrete}.

    lowered: FP32 values that a cast lowers on the way into some consumer, {value: {consumer, ...}}: each is rounded once.
    cast: values that are lowered, or raised where they cross into another scope: each takes time.
    reads_low: nodes whose kernel is handed a low tensor, once autocast and scope boundaries have cast.
    conflicts: nodes that would be handed tensors of two dtypes and cannot promote them.
    kernels: {node: what its kernel gives}, where the author casts that at once and the result is in another dtype.
    """

    dtypes: Mapping[str, str]
    lowered: Mapping[str, frozenset[str]]
    cast: frozenset[str]
    reads_low: frozenset[str]
    conflicts: frozenset[str]
    kernels: Mapping[str, str] = field(default_factory=dict)

    def computed(self, name: str) -> str:
        """The format that the node's kernel gives, before a cast that the author writes for it."""
        return self.kernels.get(name, self.dtypes.get(name, ""))

    def low(self, name: str) -> bool:
        """Whether the node's result is in a low format."""
        return is_low(self.dtypes.get(name, ""))

    def touches_low(self, name: str) -> bool:
        """Whether the node's result or anything its kernel reads is low: an upcast cannot bring back lost bits."""
        return self.low(name) or name in self.reads_low


def resolve(capture: Capture, how: Running) -> Resolution:
    """Dtype of every node when the capture runs so."""
    return Resolver(capture)(how)


class Resolver:
    """`resolve` for many ways to run one capture: what they have in common is looked up once.

    Of two ways that differ in a few wrapped modules, only what those enclose, and what follows from that, is looked at again.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._seen = [_Seen.of(node) for node in capture.graph_module.graph.nodes]
        self._place = {seen.name: place for place, seen in enumerate(self._seen)}
        self._walk: _Walk | None = None

    def __call__(self, how: Running) -> Resolution:
        """Dtype of every node when the capture runs so."""
        before = self._walk
        walk = _Walk(self._capture, how, before)
        waiting = bytearray(b"\x01") * len(self._seen) if before is None else self._otherwise(before.how, how)
        place = waiting.find(1)
        while place >= 0:
            if walk.visit(self._seen[place]):
                for reader in self._readers[place]:
                    waiting[reader] = 1
            place = waiting.find(1, place + 1)
        self._walk = walk
        return walk.resolution(self._seen)

    def _otherwise(self, before: Running, how: Running) -> bytearray:
        """Which nodes are cast otherwise than before, a 1 for each; all where that cannot be told."""
        paths = how.wrapping.otherwise(before.wrapping) if how.wrapping else None
        if paths is None:
            return bytearray(b"\x01") * len(self._seen)
        waiting = bytearray(len(self._seen))
        for path in paths:
            for place in self._around.get(path, ()):
                waiting[place] = 1
        for name, precision in how.placeholder_precision.items():
            if before.placeholder_precision.get(name) != precision:
                waiting[self._place[name]] = 1
        return waiting

    @cached_property
    def _readers(self) -> list[list[int]]:
        """By place in the graph, the places of those that read it."""
        found: list[list[int]] = [[] for _ in self._seen]
        for place, seen in enumerate(self._seen):
            for source in seen.sources:
                found[self._place[source]].append(place)
        return found

    @cached_property
    def _around(self) -> Mapping[str, set[int]]:
        """{module: places of the nodes that run inside a call of it, and of those that read them}."""
        found: dict[str, set[int]] = {}
        for name, node in self._capture.nodes.items():
            for path in {call.path for call in node.calls}:
                found.setdefault(path, set()).update((self._place[name], *self._readers[self._place[name]]))
        return found


@dataclass(frozen=True)
class _Seen:
    """A node of the graph, however it runs. own: format of its recorded result, "" for discrete ones; scalar: that has no
    dimensions. sources: what it reads, each once; arguments: as often as it is written. dtypes: those it is told, by
    position or name."""

    name: str
    kind: str
    own: str
    scalar: bool
    sources: tuple[str, ...]
    arguments: tuple[str, ...]
    dtypes: tuple[tuple[int | str, torch.dtype], ...]

    @classmethod
    def of(cls, node: fx.Node) -> _Seen:
        value = next(iter(tensors_of(node.meta.get("val"))), None)
        arguments: list[str] = []
        fx.node.map_arg((node.args, node.kwargs), lambda source: arguments.append(source.name))
        written: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
        return cls(
            name=node.name,
            kind=node.op,
            own=_name(value.dtype) if value is not None else "",
            scalar=value is not None and value.dim() == 0,
            sources=tuple(source.name for source in node.all_input_nodes),
            arguments=tuple(arguments),
            dtypes=tuple((key, dtype) for key, dtype in written if isinstance(dtype, torch.dtype)),
        )


class _Walk:
    """What every node makes of what it reads, taken from another walk until it is visited."""

    def __init__(self, capture: Capture, how: Running, before: _Walk | None = None) -> None:
        self.capture, self.how = capture, how
        self.dtypes: dict[str, str] = dict(before.dtypes) if before else {}
        self.scalar: dict[str, bool] = before.scalar if before else {}
        self.casts: dict[str, list[tuple[str, bool]]] = dict(before.casts) if before else {}
        self.reads_low: set[str] = set(before.reads_low) if before else set()
        self.conflicts: set[str] = set(before.conflicts) if before else set()
        self.kernels: dict[str, str] = dict(before.kernels) if before else {}

    def visit(self, node: _Seen) -> bool:
        """Whether the node's dtype is another than it was."""
        name = node.name
        known = self.dtypes.get(name)
        self.scalar[name] = node.scalar
        for marks in (self.reads_low, self.conflicts):
            marks.discard(name)
        for found in (self.casts, self.kernels):
            found.pop(name, None)
        if node.kind == "call_function":
            casts = self.how.casts(self.capture.nodes[name])
            called = self._call(node, casts)
            self.dtypes[name] = called if casts.literals.result is None else _name(casts.literals.result)
            if called != self.dtypes[name]:
                self.kernels[name] = called
        elif node.kind == "placeholder" and node.own:
            self.dtypes[name] = self.how.placeholder_precision.get(name, node.own)
        else:
            self._entering(node)
            self.dtypes[name] = node.own
        return self.dtypes[name] != known

    def resolution(self, order: Iterable[_Seen]) -> Resolution:
        """What was found of all of them."""
        lowered: dict[str, list[str]] = {}
        cast: dict[str, None] = {}
        for seen in order:
            for source, rounds in self.casts.get(seen.name, ()):
                cast[source] = None
                if rounds:
                    lowered.setdefault(source, []).append(seen.name)
        return Resolution(
            self.dtypes,
            {source: frozenset(readers) for source, readers in lowered.items()},
            frozenset(cast),
            frozenset(self.reads_low),
            frozenset(self.conflicts),
            self.kernels,
        )

    def _call(self, node: _Seen, casts: Casts) -> str:
        inputs, own = self._entering(node), node.own
        literal = _literal_dtype(node, casts.literals)
        if casts.autocast == "lower" and casts.precision != "fp32":
            self._lower(node, inputs, casts.precision)
            self.reads_low.add(node.name)
            return casts.precision if own == "fp32" or is_low(own) else own
        if casts.autocast == "fp32" or (casts.autocast == "fp32_unless_dtype" and not literal):
            return own
        if any(is_low(dtype) for dtype in inputs.values()):
            self.reads_low.add(node.name)
        if literal and own:
            if is_low(literal):
                self._lower(node, inputs, literal)
            return literal
        if own != "fp32" and not is_low(own):
            return own
        return self._promoted(node, inputs)

    def _entering(self, node: _Seen) -> dict[str, str]:
        """Dtype of each input once the wrapped modules on its way have cast it."""
        return {source: self._arrived(source, node.name) for source in node.sources}

    def _arrived(self, source: str, reader: str) -> str:
        dtype = self.dtypes[source]
        for step in self.how.crossing(source, reader) if dtype == "fp32" or is_low(dtype) else ():
            if dtype != step:
                self._cast(source, reader, step)
            dtype = step
        return dtype

    def _lower(self, node: _Seen, inputs: Mapping[str, str], precision: str) -> None:
        for name, dtype in inputs.items():
            if dtype == "fp32" and is_low(precision):
                self._cast(name, node.name, precision)

    def _cast(self, source: str, reader: str, precision: str) -> None:
        # What was low before is lowered again without loss.
        rounds = is_low(precision) and self.dtypes[source] == "fp32"
        self.casts.setdefault(reader, []).append((source, rounds))

    def _promoted(self, node: _Seen, inputs: Mapping[str, str]) -> str:
        floats = [(name, inputs[name]) for name in node.arguments if inputs.get(name)]
        if not floats:
            return node.own
        described = self.capture.nodes[node.name]
        row = operation(described.op)
        if row.dtype_of_first or described.in_place:
            return floats[0][1]
        found = {dtype for _, dtype in floats}
        if len(found) == 1:
            return found.pop()
        shaped = {dtype for name, dtype in floats if not self.scalar[name]}
        if len(shaped or found) > 1 and row.autocast == "lower":
            self.conflicts.add(node.name)
        return promoted([(dtype, self.scalar[name]) for name, dtype in floats])


def _literal_dtype(node: _Seen, literals: Literals) -> str:
    """The dtype that an operation is told to give, as Python writes it in this run."""
    for key, dtype in node.dtypes:
        return _name(literals.arguments.get(key, dtype))
    return ""


def _name(dtype: torch.dtype | Format) -> str:
    """The format of a dtype, or of what stands in its place; "" for discrete ones."""
    row = asked_for(dtype)
    return "" if row is None else row.name
