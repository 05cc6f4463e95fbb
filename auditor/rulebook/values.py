"""Numbers a node meets: literals among its arguments, weights it reads, and magnitudes measured in FP32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..isolation.members import named_tensors
from ..numerics.entries import entries
from ..numerics.formats import Format
from ..numerics.nodes import arguments, arguments_with_defaults, readers, row_of, shape, source
from ..records import Capture, Magnitudes

_LARGEST_EPS = 1e-2


def constants(node: fx.Node, derived: frozenset[int | str]) -> tuple[float, ...]:
    """Finite literals in the places of the call that take a number or a tensor; axes and sizes are no literals.

    derived: arguments whose literal Python computed from a dtype, and which so follow the format by themselves.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    found = []
    for index, argument in enumerate(node.target._schema.arguments):
        key: int | str = index if index < len(node.args) else argument.name
        held: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        numeric = any(name in str(argument.type) for name in ("Tensor", "number", "Scalar", "float"))
        literal = isinstance(held, (int, float)) and not isinstance(held, bool)
        if numeric and literal and key not in derived and math.isfinite(held):
            found.append(float(held))
    return tuple(found)


def eps(node: fx.Node, literals: tuple[float, ...]) -> float | None:
    """The op's `eps` argument, or the small positive literal that an add or a clamp puts under a denominator."""
    given = arguments_with_defaults(node).get("eps")
    if isinstance(given, float):
        return given
    small = [literal for literal in literals if 0 < literal <= _LARGEST_EPS]
    return min(small) if small and row_of(node).guards else None


def squares(node: fx.Node) -> bool:
    """Whether the node is x ** 2, x.square() or x * x."""
    name, args = row_of(node).packet, arguments(node)
    if name == "pow":
        return args.get("exponent") == 2 and isinstance(args.get("self"), fx.Node)
    if name == "mul":
        return _uncast(args.get("self")) is _uncast(args.get("other"))
    return name == "square"


def _uncast(node: Any) -> Any:
    """The node before its casts; not before its selections, since two chunks of a tensor are two tensors.

    What is cast may be a number: under vmap torch hands literals on as tensors, and casts those.
    """
    while isinstance(node, fx.Node) and row_of(node).cast and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def centres(node: fx.Node) -> bool:
    """Whether the node is x minus its own mean; a sum that is scaled counts as one."""
    taken = _subtracted(node)
    if taken is not None and row_of(taken).scales and len(taken.all_input_nodes) == 1:
        taken = source(taken.all_input_nodes[0])
        return row_of(taken).packet == "sum" and _reads_minuend(node, taken)
    return taken is not None and row_of(taken).packet == "mean" and _reads_minuend(node, taken)


def shifts_by_max(node: fx.Node) -> bool:
    """Whether the node is x minus its own largest entries, or about so much."""
    taken = _subtracted(node)
    return taken is not None and row_of(taken).maximum and _reads_minuend(node, taken)


def _subtracted(node: fx.Node) -> fx.Node | None:
    """What a difference of two tensors takes off the first."""
    if row_of(node).packet != "sub" or len(node.all_input_nodes) < 2:
        return None
    return source(node.all_input_nodes[1])


def _reads_minuend(node: fx.Node, reduction: fx.Node) -> bool:
    return source(node.all_input_nodes[0]) in {source(item) for item in reduction.all_input_nodes}


@dataclass(frozen=True)
class Extremes:
    """Largest finite and smallest non-zero magnitude; None for an all-zero tensor."""

    max_abs: float
    min_abs: float | None


class Weights:
    """Extremes of the parameters and floating buffers behind the placeholders of a capture, computed once each."""

    def __init__(self, capture: Capture, model: nn.Module) -> None:
        state = dict(named_tensors(model))
        self._kinds = {item.name: item.kind for item in capture.placeholders}
        self._tensors = {item.name: state[item.fqn] for item in capture.placeholders if item.fqn in state}
        self._known: dict[str, Extremes] = {}
        self._readers = self._readers_by_tensor(capture)

    def read_by(self, node: fx.Node, kind: str) -> list[Extremes]:
        """Extremes of the tensors of this kind that the node reads directly, or through reshapes and casts."""
        names = {source(item).name for item in node.all_input_nodes}
        held = sorted(name for name in names if self._kinds.get(name) == kind and name in self._tensors)
        return [self._extremes(name) for name in held if self._tensors[name].is_floating_point()]

    def uses(self, node: fx.Node) -> int | None:
        """Operations that read the parameter which, of those the node reads, most operations read."""
        held = [
            item
            for item in (source(item) for item in node.all_input_nodes)
            if self._kinds.get(item.name) == "parameter"
        ]
        return max((self._readers[id(self._tensors.get(item.name))] for item in held), default=None)

    def _readers_by_tensor(self, capture: Capture) -> dict[int, int]:
        """Readers of all placeholders that hold the same tensor: a tied weight may come in under several names."""
        found: dict[int, set[str]] = {}
        for item in capture.graph_module.graph.nodes:
            if item.op == "placeholder":
                names = found.setdefault(id(self._tensors.get(item.name)), set())
                names.update(reader.name for reader in readers(item))
        return {tensor: len(names) for tensor, names in found.items()}

    def _extremes(self, name: str) -> Extremes:
        if name not in self._known:
            self._known[name] = _extremes(self._tensors[name])
        return self._known[name]


def _extremes(tensor: torch.Tensor) -> Extremes:
    if tensor.device.type == "meta":
        return Extremes(0.0, None)
    flat = entries(tensor.detach()).reshape(-1)
    blocks = torch.split(flat, _BLOCK) if flat.is_cpu else [flat]
    ends = [found for block in blocks if (found := _ends(block.abs()))]
    return Extremes(max(most for _, most in ends), min(least for least, _ in ends)) if ends else Extremes(0.0, None)


_BLOCK = 1 << 18
"""Entries that are looked at together: what is made of them stays in the processor's cache."""


def _ends(magnitudes: torch.Tensor) -> tuple[float, float] | None:
    """The smallest that is not zero, and the largest that is finite."""
    if magnitudes.numel() == 0:
        return None
    least, most = float(magnitudes.amin()), float(magnitudes.amax())  # aminmax takes longer than both
    if least > 0 and most < math.inf:  # of NaN neither holds
        return least, most
    return _ends(held) if (held := magnitudes[torch.isfinite(magnitudes) & (magnitudes > 0)]).numel() else None


def input_max_abs(node: fx.Node, ranges: Mapping[str, Magnitudes], weights: frozenset[str]) -> float | None:
    """Largest magnitude among the node's activations, each taken where it was measured last; `weights` are none."""
    activations = [item for item in node.all_input_nodes if source(item).name not in weights]
    return largest([item.max_abs for item in (nearest_range(item, ranges) for item in activations) if item])


def nearest_range(node: fx.Node, ranges: Mapping[str, Magnitudes]) -> Magnitudes | None:
    """Magnitudes of the node, measured at the nearest place above it that holds the same values."""
    for candidate in _upwards(node):
        if candidate.name in ranges:
            return ranges[candidate.name]
    return None


def _upwards(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    while row_of(node).transparent and node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


def headroom_bits(max_abs: float | None, row: Format) -> float | None:
    """log2(largest / max_abs): how often the value may double before it overflows; negative once it has."""
    return math.log2(row.largest / max_abs) if max_abs else None


def spacing(max_abs: float | None, row: Format) -> float | None:
    """Distance of the format's numbers in the binade of the value; where it is subnormal, of the subnormal ones."""
    if not max_abs:
        return None
    return math.ldexp(1.0, max(math.frexp(max_abs)[1] - 1, row.min_exponent) - row.mantissa)


def numel(node: fx.Node) -> int | None:
    """Elements of the node's (first) output, None where its shape is not known."""
    try:
        return math.prod(shape(node))
    except ValueError:
        return None


def derived_arguments(capture: Capture) -> dict[str, frozenset[int | str]]:
    """Per node, the arguments whose literal changes with the format."""
    found = {}
    for name, node in capture.nodes.items():
        changed = [*node.literals.values(), *node.autocast_literals.values()]
        found[name] = frozenset(key for literals in changed for key in literals.arguments)
    return found


def smallest(values: list[Any]) -> float | None:
    """The smallest of the known values, None if none is known."""
    known = [value for value in values if value is not None]
    return min(known) if known else None


def largest(values: list[Any]) -> float | None:
    """The largest of the known values, None if none is known."""
    known = [value for value in values if value is not None]
    return max(known) if known else None
