"""Measures every node in every format against the FP32 reference, in one pass over the graph."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from ..capture.paths import reach
from ..execution.execute import Executor
from ..numerics.entries import entries, is_number, is_plain, over_tensors
from ..numerics.formats import format_of
from ..numerics.histogram import Profile
from ..numerics.nodes import tensors_in, view_source
from ..records import Batch, Capture, Magnitudes, NodeError
from ..stages import tick
from .alone import Leaves, LowPrecisionProbe, Trace
from .products import sample_product
from .quantized import QuantizedLayers
from .reference import Back, Reference, as_leaf
from .values import GradientPlace, Listener, Values, reading

AT_ONCE = 4
"""Peak memory of measuring an operation, as a multiple of the size of its inputs and results."""


TRIM_EVERY = 50
"""Number of operations after which freed memory is returned to the system."""


@dataclass
class Measurement:
    """The FP32 reference with its autograd graph, and the errors of every node in each format.

    anchors: leaves of the autograd graph for results that depend on no float input. readings: {product: {value it
    reads: whether other nodes read the value too}}. values: detached FP32 result of every node and placeholder. live:
    weights, inputs and outputs inside the autograd graph. places: the values with a gradient, and their shapes.
    listeners: receivers of the values' gradients. elements: number of all results' entries. discrete: nodes without a
    floating-point result. errors, traces: {operation: {format: value}}. ranges: magnitudes of every value. blind: nodes
    with a path to the outputs through a non-differentiable operation. pure: formats in which the whole model ran in low
    precision. under_flags: by product, results of `flag_errors`. quantized: runs layers under quantization schemes."""

    capture: Capture
    formats: tuple[str, ...]
    flat_inputs: Sequence[Any]
    anchors: Leaves
    values: Values
    readings: dict[str, Mapping[str, bool]] = field(default_factory=dict)
    live: dict[str, Leaves] = field(default_factory=dict)
    places: dict[GradientPlace, torch.Size] = field(default_factory=dict)
    listeners: dict[GradientPlace, Listener] = field(default_factory=dict)
    elements: int = 0
    discrete: set[str] = field(default_factory=set)
    ranges: dict[str, Magnitudes] = field(default_factory=dict)
    errors: dict[str, Mapping[str, NodeError]] = field(default_factory=dict)
    traces: dict[str, Mapping[str, Trace]] = field(default_factory=dict)
    alone: Mapping[str, LowPrecisionProbe] = field(default_factory=dict)
    pure: frozenset[str] = frozenset()
    blind: frozenset[str] = frozenset()
    under_flags: dict[str, Mapping[str, float]] = field(default_factory=dict)
    quantized: QuantizedLayers = field(init=False)

    def __post_init__(self) -> None:
        self.quantized = QuantizedLayers(self.capture, self.values)

    def keep(self, n: fx.Node, reference: Any, profiles: dict[fx.Node, Profile]) -> None:
        """Store a node's result and its magnitudes, and put the magnitudes into `profiles`."""
        leaves = tensors_in(reference)
        if n.op != "call_function" or n.name in self.capture.outputs:
            self.live[n.name] = leaves
        self.elements += sum(x.numel() for x in leaves)
        if not all(x.is_floating_point() and is_plain(x) for x in leaves[:1]):
            self.discrete.add(n.name)
        for index, leaf in enumerate(leaves):
            self.listen(GradientPlace(n.name, n.name, index), leaf)
        detached = over_tensors(torch.Tensor.detach, reference)
        self.values.keep(n, detached)
        real = next((entries(leaf) for leaf in tensors_in(detached) if is_number(leaf)), None)
        if real is not None:
            source = view_source(n)
            seen = profiles.get(source) if source is not None else None
            profiles[n] = seen or Profile(real)
            self.ranges[n.name] = profiles[n].range

    def keep_readings(self, n: fx.Node, copies: Mapping[str, torch.Tensor | None]) -> None:
        """Note the values that a product or norm reads. copies: for each value, the copy that only this node reads, whose
        gradients are received too; None if no other node reads the value."""
        if not copies:
            return
        self.readings[n.name] = {value: copy is not None for value, copy in copies.items()}
        for value, copy in copies.items():
            if copy is not None:
                self.listen(GradientPlace(reading(n.name, value), value, 0), copy)

    def run_alone(self, n: fx.Node, used_up: Iterable[fx.Node]) -> None:
        """Run an operation in every format, and store its errors and their traces. used_up: nodes whose results no later
        node reads."""
        errors = dict[str, NodeError]()
        traces = dict[str, Trace]()
        sample = sample_product(n, self.values)
        # A weight is freed, and rounded again for its next reader: tied weights would occupy memory long.
        weights = [source for source in n.all_input_nodes if source.op != "call_function"]
        for fmt, probe in self.alone.items():
            with torch.no_grad():
                errors[fmt], traces[fmt] = probe.measure(n, sample)
            probe.forget((*used_up, *weights))
        if sample:
            self.under_flags[n.name] = sample.flag_errors()
        self.errors[n.name] = errors
        self.traces[n.name] = traces

    def listen(self, place: GradientPlace, leaf: torch.Tensor) -> None:
        """Pass a value's gradients on to `listeners`; the hook does not keep the value alive."""
        if format_of(leaf.dtype) is None or not leaf.requires_grad or not is_plain(leaf):
            return
        self.places[place] = leaf.shape
        listeners = self.listeners

        def pass_on(gradient: torch.Tensor) -> None:
            if place in listeners:
                listeners[place](gradient)

        leaf.register_hook(pass_on)  # type: ignore[no-untyped-call]

    @property
    def outputs(self) -> Leaves:
        """All output tensors of this forward pass, still attached to autograd."""
        return [leaf for name in self.capture.outputs for leaf in self.live.get(name, [])]

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """{name: node of the graph}."""
        return {n.name: n for n in self.capture.graph_module.graph.nodes}


def measure(
    capture: Capture,
    model: nn.Module,
    batch: Batch,
    formats: Sequence[str],
    *,
    back: Back = "trusted",
) -> Measurement:
    """Run the FP32 reference with autograd. In each format, run every node alone, and the whole model.

    The model's tensors are read, never written: the graph runs on detached leaves. back: how to treat backward passes,
    which may raise; see Reference.
    """
    reference = Reference(back)
    profiles = dict[fx.Node, Profile]()
    inputs = [_leaf(value) for value in capture.bind(model, batch)]
    values = Values(capture.graph_module.graph)
    measured = Measurement(capture, tuple(formats), inputs, reference.anchors, values)
    measured.alone = {fmt: LowPrecisionProbe(capture, fmt, values, profiles, measured.readings) for fmt in formats}
    executor = Executor(capture.graph_module, reference)
    with torch.enable_grad():
        for n, result in executor.steps(*measured.flat_inputs):
            if n.op != "output":
                measured.keep(n, result, profiles)
            measured.keep_readings(n, reference.readings.pop(n.name, {}))
            if n.op != "call_function":
                continue
            tick(n.name)
            used_up = executor.user_to_last_uses.get(n, ())
            measured.run_alone(n, used_up)
            for source in used_up:
                profiles.pop(source, None)
                if source.name not in measured.live:
                    values.release(source, reference.saved)
            if len(measured.errors) % TRIM_EVERY == 0:
                _trim()
    for probe in measured.alone.values():
        probe.forget([*probe.env])
    profiles.clear()
    _trim()
    measured.pure = frozenset(fmt for fmt, probe in measured.alone.items() if probe.pure)
    downstream = reach(reference.lost, lambda n: n.all_input_nodes)
    measured.blind = frozenset(n.name for n in downstream)
    return measured


def _trim() -> None:
    """Return freed memory to the system: glibc keeps free blocks that lie between live tensors."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def working_set(capture: Capture) -> int:
    """Peak bytes for measuring the largest operation: FP32 and low-precision values, gradients, comparisons."""

    def size(n: fx.Node) -> int:
        values = tensors_in(n.meta.get("val"))
        return sum(x.numel() * max(x.element_size(), 4) for x in values if not x.is_nested)

    called = (n for n in capture.graph_module.graph.nodes if n.op == "call_function")
    return AT_ONCE * max((sum(map(size, {n, *n.all_input_nodes})) for n in called), default=0)


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().clone() if value.is_inference() else value.detach()
    return as_leaf(value) if format_of(value.dtype) is not None and is_plain(value) else value
