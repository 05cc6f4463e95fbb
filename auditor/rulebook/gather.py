"""Facts of every node of a capture, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ..numerics.formats import FORMATS, label, narrower
from ..numerics.nodes import dtype, op_of, readers, source
from ..numerics.operations import operation
from ..records import Capture, Magnitudes, Verdict
from .dimensions import (
    gemm_alignment,
    gemm_m_alignment,
    gemm_padding,
    gemm_size,
    misaligned,
    reduction_length,
    sequence_length,
)
from .facts import NodeFacts
from .lowered import Uses, autocast_on
from .numbers import additions, cancelled_bits, divisor_min_abs, phases, reads_whole_numbers, reduce_op, whole_numbers
from .position import Positions, positions
from .values import (
    as_one,
    beyond,
    centres,
    constants,
    derived_arguments,
    eps,
    formats_where,
    headroom_bits,
    input_max_abs,
    largest,
    numel,
    shifts_by_max,
    smallest,
    spacing,
    squares,
)


def gather(
    capture: Capture,
    ranges: Mapping[str, Magnitudes],
    verdicts: Mapping[str, Mapping[str, Verdict]] | None = None,
) -> dict[str, NodeFacts]:
    """Facts of every operation, keyed by node name, in graph order.

    ranges: magnitudes measured in FP32, keyed by node or placeholder; verdicts: {node: {format: Verdict}}. Facts
    that need either stay None without it.
    """
    collector = _Collector(capture, ranges, verdicts or {})
    return {node.name: collector.facts(node) for node in capture.graph_module.graph.nodes if node.name in capture.nodes}


class _Collector:
    """What is computed once per capture and read for every node."""

    def __init__(
        self,
        capture: Capture,
        ranges: Mapping[str, Magnitudes],
        verdicts: Mapping[str, Mapping[str, Verdict]],
    ) -> None:
        self._capture = capture
        self._ranges = ranges
        self._verdicts = verdicts
        self._kinds = {item.name: item.kind for item in capture.placeholders}
        self._positions: Positions = positions(capture)
        self._uses = Uses(capture)
        self._derived = derived_arguments(capture)
        self._additions = additions(capture, ranges)
        self._phases = phases(capture)

    def facts(self, node: fx.Node) -> NodeFacts:
        """Facts of one operation."""
        return NodeFacts(**self._place(node), **_by_itself(node), **self._literals(node), **self._magnitudes(node))

    def _place(self, node: fx.Node) -> dict[str, Any]:
        """What it is, where it stands, and what autocast makes of it."""
        record, name = self._capture.nodes[node.name], node.name
        row = operation(record.op)
        return {
            "op": record.op,
            "operation": row.name,
            "owner": record.owner,
            "owner_type": record.owner_type,
            "dtype": record.dtype,
            "input_dtype": _input_dtype(node),
            "is_first_layer": name in self._positions.first,
            "is_last_layer": name in self._positions.last,
            "from_weights": name in self._positions.from_weights,
            "consumers": tuple(sorted({op_of(reader) for reader in readers(node)})),
            "producers": tuple(sorted({op_of(source(item)) for item in node.all_input_nodes})),
            "upcast": name in self._uses.upcasts,
            "casts_up": self._uses.casts_up(node),
            "casts_up_input": self._uses.casts_up_input(node),
            "low_where": self._uses.where(node),
            "autocast_off": not autocast_on(self._capture, name),
            "autocast": "none" if record.in_place else row.autocast,
            "additions": self._additions[node].length,
            "absorbed": self._additions[node].absorbed,
            "in_a_phase": node in self._phases,
            "weight_uses": max((len({*readers(item)}) for item in self._held(node, "parameter")), default=None),
        }

    def _held(self, node: fx.Node, kind: str) -> set[fx.Node]:
        """Parameters or buffers that the node reads directly, or through reshapes and casts."""
        return {item for item in map(source, node.all_input_nodes) if self._kinds.get(item.name) == kind}

    def _held_max_abs(self, node: fx.Node, kind: str) -> float | None:
        return largest(
            [self._ranges[item.name].max_abs for item in self._held(node, kind) if item.name in self._ranges]
        )

    def _literals(self, node: fx.Node) -> dict[str, Any]:
        """The numbers that the author wrote into it."""
        floating = self._capture.nodes[node.name].floating
        derived = self._derived.get(node.name, frozenset())
        literals = constants(node, derived) if floating else ()
        return {
            "constants": literals,
            "constant_max_abs": largest([abs(c) for c in literals]),
            "constant_largest": max(literals, key=abs, default=None),
            "constant_min_abs": smallest([abs(c) for c in literals if c]),
            "constant_gap_to_one": smallest([abs(1 - c) for c in literals if c != 1]),
            "constants_beyond": formats_where(beyond, literals),
            "constants_as_one": formats_where(as_one, literals),
            "follows_dtype": bool(derived),
            "eps": eps(node, literals),
        }

    def _magnitudes(self, node: fx.Node) -> dict[str, Any]:
        """What was measured of the values it reads and gives, and what was judged by it."""
        output = self._ranges.get(node.name)
        output_max_abs = output.max_abs if output else None
        into = input_max_abs(node, self._ranges, self._positions.from_weights)
        verdicts = self._verdicts.get(node.name, {})
        return {
            "weight_max_abs": self._held_max_abs(node, "parameter"),
            "buffer_max_abs": self._held_max_abs(node, "buffer"),
            "input_max_abs": into,
            "output_max_abs": output_max_abs,
            "divisor_min_abs": divisor_min_abs(node, self._ranges),
            "cancelled_bits": cancelled_bits(node, into, output_max_abs),
            "spacing": {name: spacing(output_max_abs, FORMATS[name]) for name in narrower()},
            "headroom_bits": {name: headroom_bits(output_max_abs, FORMATS[name]) for name in narrower()},
            "verdict": {name: found.verdict for name, found in verdicts.items()},
            "label": {name: label(name) for name in narrower()},
            "reason": {name: found.reason for name, found in verdicts.items()},
        }


def _by_itself(node: fx.Node) -> dict[str, Any]:
    """How much work it is, by shapes alone, and what it is known to do by how it is written."""
    m, n, k = gemm_size(node) or (None, None, None)
    return {"gemm_m": m, "gemm_n": n, "gemm_k": k, **{fact.__name__: fact(node) for fact in _OF_NODE}}


_OF_NODE: Sequence[Callable[[fx.Node], Any]] = (
    *(numel, reduction_length, sequence_length, gemm_alignment, gemm_m_alignment, gemm_padding, misaligned, reduce_op),
    *(whole_numbers, reads_whole_numbers, squares, centres, shifts_by_max),
)
"""Facts that are found by functions of their names."""


def _input_dtype(node: fx.Node) -> str | None:
    found = dtype(node.all_input_nodes[0]) if node.all_input_nodes else None
    return str(found).removeprefix("torch.") if found else None
