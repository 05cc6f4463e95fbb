"""Collects the facts of every node of a capture: its position, its precision if all operations are in low
precision, and its magnitudes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from ..execution.mixtures import Mixture, find_mixtures
from ..execution.policy import Policy, plain
from ..execution.resolve import is_low, resolve
from ..measure.quantized import key_layers
from ..numerics.formats import FORMATS, dtype_name, narrower
from ..numerics.nodes import dtype, op_of, readers, row_of, shape, source
from ..numerics.operations import operation
from ..numerics.schemes import SCHEMES
from ..records import Capture, Magnitudes, Verdict
from ..records.quantization import QuantizedLayer
from . import values
from .compiled import Recomputed, unrounded_comparisons
from .counts import facts_of_counts
from .dimensions import gemm, reduction_length, sequence_length
from .facts import NodeFacts
from .mixed import Describer, changes_where_made

OF_NODE = (
    *(values.numel, reduction_length, sequence_length, values.reduce_op),
    *(values.whole_numbers, values.reads_whole_numbers, values.squares, values.centres, values.shifts_by_max),
)
"""Functions of a node, each of which computes the fact with the function's name."""


def gather(
    capture: Capture,
    ranges: Mapping[str, Magnitudes],
    verdicts: Mapping[str, Mapping[str, Verdict]] = MappingProxyType({}),
    layers: Mapping[str, Mapping[str, QuantizedLayer]] = MappingProxyType({}),
    gradients: Recomputed = MappingProxyType({}),
) -> dict[str, NodeFacts]:
    """Facts of every operation, keyed by node name, in graph order.

    ranges: magnitudes measured in FP32, keyed by node or placeholder; verdicts: {node: {format or scheme: Verdict}};
    layers: {node: {scheme: QuantizedLayer}}; gradients: see `unrounded_gradients`. Facts that need a missing entry are
    None.
    """
    positions_of = positions(capture)
    uses = Uses(capture)
    positions_of["makes_keys"] = key_layers(capture)
    runs = values.additions(capture, ranges)
    in_phases = values.phases(capture)
    kinds = {item.name: item.kind for item in capture.placeholders}
    recomputed = {**gradients, **unrounded_comparisons(capture, ranges, uses.under)}

    def facts(node: fx.Node) -> NodeFacts:
        name = node.name
        record = capture.nodes[name]
        row = operation(record.op)

        sources = [source(item) for item in node.all_input_nodes]
        parameters = {item for item in sources if kinds.get(item.name) == "parameter"}
        buffers = {item for item in sources if kinds.get(item.name) == "buffer"}
        uses_of_weights = [len({*readers(item)}) for item in parameters]
        sizes_of_buffers = [ranges[item.name].max_abs for item in buffers if item.name in ranges]
        input_dtype = dtype(node.all_input_nodes[0]) if node.all_input_nodes else None

        literals = (*record.literals.values(), *record.autocast_literals.values())
        derived = frozenset(key for of_format in literals for key in of_format.arguments)

        by_itself: dict[str, Any] = {fact: name in names for fact, names in positions_of.items()}
        by_itself |= {fact.__name__: fact(node) for fact in OF_NODE}
        by_itself |= {fact: getattr(record, fact) for fact in ("op", "owner", "owner_type", "torch_module", "dtype")}
        return NodeFacts(
            operation=row.name,
            input_dtype=None if input_dtype is None else dtype_name(input_dtype),
            consumers=tuple(sorted({op_of(reader) for reader in readers(node)})),
            producers=tuple(sorted({op_of(item) for item in sources})),
            upcast=name in uses.upcasts,
            casts_up=uses.casts_up(node),
            casts_up_input=uses.casts_up_input(node),
            low_where=uses.where(node),
            **uses.mixed.get(name, {}),
            **_recomputed(recomputed.get(name, {})),
            autocast_off=record.region is not None and not record.region.enabled,
            autocast="none" if record.in_place else row.autocast,
            additions=runs[node].length,
            absorbed=runs[node].absorbed,
            in_a_phase=node in in_phases,
            weight_uses=max(uses_of_weights, default=None),
            buffer_max_abs=max(sizes_of_buffers, default=None),
            **_sizes(node, ranges, positions_of["from_weights"], verdicts.get(name, {})),
            **_under_schemes(layers.get(name, {})),
            **gemm(node),
            **facts_of_counts(node, ranges),
            **by_itself,
            **_literals(node, record.floating, derived),
            **_cast_constant(values.cast_constant(node, capture, ranges)),
        )

    return {node.name: facts(node) for node in capture.graph_module.graph.nodes if node.name in capture.nodes}


def _sizes(
    node: fx.Node, ranges: Mapping[str, Magnitudes], weights: set[str], verdicts: Mapping[str, Verdict]
) -> dict[str, Any]:
    """Facts about magnitudes of inputs and result, and about verdicts."""
    into = values.input_max_abs(node, ranges, weights)
    output = ranges[node.name].max_abs if node.name in ranges else None
    return {
        "input_max_abs": into,
        "output_max_abs": output,
        "divisor_min_abs": values.divisor_min_abs(node, ranges),
        "cancelled_bits": values.cancelled_bits(node, into, output),
        "spacing": {fmt: values.spacing_at(output, FORMATS[fmt]) for fmt in narrower()},
        "headroom_bits": {fmt: values.headroom_bits(output, FORMATS[fmt]) for fmt in narrower()},
        "verdict": {fmt: one.verdict for fmt, one in verdicts.items()},
        "reason": {fmt: one.reason for fmt, one in verdicts.items()},
    }


def _recomputed(makers: Mapping[str, str]) -> dict[str, Any]:
    """Facts about a value that is computed again without rounding. makers: {strategy: the operation that rounds it}."""
    return {
        "unrounded": next(iter(makers.values()), None),
        "unrounded_where": WORDS["autocast" in makers, "cast" in makers],
    }


def _under_schemes(layers: Mapping[str, QuantizedLayer]) -> dict[str, Any]:
    """Facts about one layer under each quantization scheme. layers: {scheme: result of the layer}."""
    return {
        "weight_bits": {scheme: SCHEMES[scheme].weight.bits for scheme in layers},
        **{fact: {s: getattr(layer, fact) for s, layer in layers.items()} for fact in ("cause", "part", "place")},
        "gain": {scheme: _gain(layer) for scheme, layer in layers.items()},
    }


def _gain(layer: QuantizedLayer) -> str:
    """What smoothing a layer's input gains, as the end of a sentence; empty if not measured."""
    if layer.smoothed is None:
        return ""
    return f". With a smoothed input ({layer.smoothing}), the layer's effect is {layer.smoothed:.2g} instead of {layer.effect:.2g}"


def _literals(node: fx.Node, floating: bool, derived: frozenset[int | str]) -> dict[str, Any]:
    """Facts about the literals in the user's code for this operation."""
    literals = values.constants(node, derived) if floating else ()
    return {
        "constants": literals,
        "constant_max_abs": max(map(abs, literals), default=None),
        "constant_largest": max(literals, key=abs, default=None),
        "constant_min_abs": min((abs(c) for c in literals if c), default=None),
        "constant_gap_to_one": min((abs(1 - c) for c in literals if c != 1), default=None),
        "constants_beyond": tuple(fmt for fmt in narrower() if any(values.beyond(c, fmt) for c in literals)),
        "constants_as_one": tuple(
            fmt for fmt in narrower() if any(c != 1 and values.round_literal(c, fmt) == 1 for c in literals)
        ),
        "follows_dtype": bool(derived),
        "eps": values.eps(node, literals),
    }


def _cast_constant(literal: float | None) -> dict[str, Any]:
    """Facts about the literal that a cast reads."""
    beyond = () if literal is None else tuple(fmt for fmt in narrower() if values.beyond(literal, fmt))
    return {"cast_constant": literal, "cast_constant_beyond": beyond}


def positions(capture: Capture) -> dict[str, set[str]]:
    """{fact, such as `is_first_layer`: nodes for which it holds}. First layers have no layer upstream, last layers no
    layer between them and an output.

    A layer has an input computed only from parameters (a weight norm's product counts), and another input; norms and
    scales are not layers. A model with several branches has several first and last layers.
    """
    fixed = {item.name for item in capture.placeholders if item.kind != "input"}
    of_parameters = {item.name for item in capture.placeholders if item.kind == "parameter"}
    layers, below = set(), set()
    for name, node in capture.nodes.items():
        row, alone = operation(node.op), fixed.issuperset(node.inputs)
        learned = not of_parameters.isdisjoint(node.inputs)
        applies = row.layer or row.linear or row.recurrent or row.cell
        if applies and learned and (not alone or row.embedding):
            layers.add(name)
        if alone:
            fixed.add(name)
            of_parameters |= {name} if learned else set()
        if any(item in layers or item in below for item in node.inputs):
            below.add(name)
    reaching, above = set(capture.outputs), set[str]()
    for name, node in reversed([*capture.nodes.items()]):
        if name in reaching:
            reaching.update(node.inputs)
        if name in above or (name in layers and name in reaching):
            above.update(node.inputs)
    alive = layers & reaching
    return {"is_first_layer": alive - below, "is_last_layer": alive - above, "from_weights": fixed}


WORDS = {
    (True, True): "under autocast and with cast weights",
    (True, False): "under autocast (not with cast weights)",
    (False, True): "with cast weights (not under autocast)",
    (False, False): None,
}


def describe_mixtures(
    capture: Capture, under_autocast: Mapping[str, Mixture], with_cast: Mapping[str, Mixture]
) -> dict[str, dict[str, Any]]:
    """{operation that gets two dtypes and raises: the facts about it, from `mixed_where` to `fixed_where_read`}."""
    describer, result = Describer(capture), dict[str, dict[str, Any]]()
    for name in (*under_autocast, *(name for name in with_cast if name not in under_autocast)):
        mixtures_of_node = [mixtures[name] for mixtures in (under_autocast, with_cast) if name in mixtures]
        fix = describer.fix(name, mixtures_of_node)
        result[name] = {
            "mixed_where": WORDS[name in under_autocast, name in with_cast],
            "fp32_origin": describer.origins(mixtures_of_node),
            "dtype_fix": fix,
            "fixed_where_read": not changes_where_made(fix),
        }
    return result


class Uses:
    """The dtypes of a capture with everything in low precision, under autocast and with cast weights. upcasts:
    operations that the user's code runs in FP32. mixed: {operation that gets two dtypes and raises: facts about it}.
    under: {strategy: predicted dtypes}.

    An operation that autocast lowers, such as a product, passes on no FP32 dtype, unless the code disables autocast.
    """

    def __init__(self, capture: Capture) -> None:
        formats = (fmt for node in capture.nodes.values() for fmt in (*node.literals, *node.autocast_literals))
        fmt = next(formats, "bf16")
        policies = [Policy(capture, strategy, plain(fmt), fmt) for strategy in ("autocast", "cast")]
        self._under, self._cast = map(resolve, policies)
        self.under = {"autocast": self._under, "cast": self._cast}
        mixtures = [
            find_mixtures(policy, used) for policy, used in zip(policies, (self._under, self._cast), strict=True)
        ]
        self.mixed = describe_mixtures(capture, *mixtures)
        self.upcasts = frozenset(
            node.name
            for node in capture.graph_module.graph.nodes
            if node.name in capture.nodes and self._is_upcast(node)
        )

    def where(self, node: fx.Node) -> str | None:
        """The strategies under which the node computes in low precision, in words; None if no strategy does."""
        floating = values.is_floating(node)
        return WORDS[floating and self._under.low(node.name), floating and self._cast.low(node.name)]

    def casts_up(self, node: fx.Node) -> bool:
        """Whether the node itself casts to FP32, or creates an FP32 value."""
        makes = row_of(node).cast or _is_made(node)
        return makes and self._is_high(node)

    def casts_up_input(self, node: fx.Node) -> bool:
        """Whether one of the node's inputs is a cast to FP32, ignoring reshapes."""
        origins = (source(item, _casts) for item in node.all_input_nodes)
        return node.name in self.upcasts and any(_casts(each) and self._is_high(each) for each in origins)

    def _is_high(self, node: fx.Node) -> bool:
        """Whether a node's value is FP32 under both strategies; False for a new scalar, which promotes nothing."""
        if node.op != "call_function" or not values.is_floating(node) or (_is_made(node) and shape(node) == ()):
            return False
        return not self._cast.low(node.name) and not self._under.low(node.name)

    def _is_upcast(self, node: fx.Node) -> bool:
        reads = any(self._hands_on(item, node) for item in node.all_input_nodes)
        if not values.is_floating(node) or row_of(node).cast:
            return reads and not values.is_floating(node)
        raises = node.name in self._cast.conflicts
        if is_low(self._cast.computed_format(node.name)) and not raises:
            return False
        return reads or (self._is_high(node) and (_is_made(node) or not self._under.low(node.name)))

    def _hands_on(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether `reader` computes in FP32 because of its input `node`. If `reader` has low-precision inputs too, a
        newly created `node` is a reason only if `reader` promotes types, or only reshapes, selects or casts."""
        row = row_of(reader)
        beside_low = any(self._cast.low(item.name) for item in reader.all_input_nodes)
        made = _is_made(source(node, _casts)) and beside_low and not (row.promotes or row.transparent)
        return self._is_high(node) and not made


def _casts(node: fx.Node) -> bool:
    return row_of(node).cast


def _is_made(node: fx.Node) -> bool:
    """Whether the node creates its value without inputs, or only from integers."""
    read = [dtype(item) for item in node.all_input_nodes]
    return node.op == "call_function" and not any(
        stored_dtype and (stored_dtype.is_floating_point or stored_dtype.is_complex) for stored_dtype in read
    )
