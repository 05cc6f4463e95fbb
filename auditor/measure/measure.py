"""Measures every node in every format against the FP32 reference, in one pass over the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.paths import reach
from ..execution.execute import Executor
from ..numerics.entries import entries, is_number, is_plain
from ..numerics.formats import format_of
from ..numerics.histogram import Profile
from ..numerics.nodes import tensors_in, view_source
from ..records import Batch, Capture, Magnitudes, NodeError
from ..stages import tick
from .alone import Alone, InFormat, Leaves, Trace
from .reference import Back, Reference, as_leaf

AT_ONCE = 4
"""Peak memory of measuring an operation, as a multiple of the size of its inputs and results."""


@dataclass
class Measurement:
    """The FP32 reference with its autograd graph, and the errors of every node in each format.

    anchors: leaves of the autograd graph for results that depend on no float input. readings: {product: {value it
    reads: the copy that only this product reads, or None if no other node reads the value}}. values: detached FP32
    result of every node and placeholder. live: the same results inside the autograd graph. errors, traces: {operation:
    {format: value}}. ranges: magnitudes of every value. blind: nodes with a path to the outputs through a
    non-differentiable operation. pure: formats in which the whole model ran in low precision.
    """

    capture: Capture
    formats: tuple[str, ...]
    flat_inputs: Sequence[Any]
    anchors: Leaves
    readings: Mapping[str, Mapping[str, torch.Tensor | None]]
    values: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Leaves] = field(default_factory=dict)
    ranges: dict[str, Magnitudes] = field(default_factory=dict)
    errors: dict[str, Mapping[str, NodeError]] = field(default_factory=dict)
    traces: dict[str, Mapping[str, Trace]] = field(default_factory=dict)
    alone: Mapping[str, Alone] = field(default_factory=dict)
    pure: frozenset[str] = frozenset()
    blind: frozenset[str] = frozenset()

    def keep(self, n: fx.Node, reference: Any, profiles: dict[fx.Node, Profile]) -> None:
        """Store a node's result and its magnitudes, and put the magnitudes into `profiles`."""
        self.live[n.name] = tensors_in(reference)
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, reference)
        self.values[n.name] = detached
        real = next((entries(leaf) for leaf in tensors_in(detached) if is_number(leaf)), None)
        if real is not None:
            source = view_source(n)
            seen = profiles.get(source) if source is not None else None
            profiles[n] = seen or Profile(real)
            self.ranges[n.name] = profiles[n].range

    @property
    def outputs(self) -> Leaves:
        """The model's outputs, inside the autograd graph."""
        return [leaf for name in self.capture.outputs for leaf in self.live.get(name, [])]

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """Nodes of the graph, by name."""
        return {n.name: n for n in self.capture.graph_module.graph.nodes}


def measure(
    capture: Capture,
    model: nn.Module,
    batch: Batch,
    formats: Sequence[str],
    *,
    back: Back = "trusted",
) -> Measurement:
    """Run the FP32 reference with autograd, and in each format every node by itself and the whole model.

    The model's tensors are read, never written: the graph runs on detached leaves. back: how to treat backward passes,
    which may raise; see Reference.
    """
    reference, profiles = Reference(back), dict[fx.Node, Profile]()
    found = Measurement(
        capture,
        tuple(formats),
        [_leaf(value) for value in capture.bind(model, batch)],
        reference.anchors,
        reference.readings,
    )
    low = {name: InFormat(capture, name, found.values, profiles, reference.readings) for name in formats}
    executor = Executor(capture.graph_module, reference)
    with torch.enable_grad():
        for n, result in executor.steps(*found.flat_inputs):
            if n.op != "output":
                found.keep(n, result, profiles)
            if n.op == "call_function":
                tick(n.name)
                used_up = executor.user_to_last_uses.get(n, ())
                told = {}
                for name, run in low.items():
                    with torch.no_grad():
                        told[name] = run.measure(n)
                    # A weight is freed, and rounded again for its next reader: tied weights would occupy memory long.
                    run.forget((*used_up, *(source for source in n.all_input_nodes if source.op != "call_function")))
                found.errors[n.name] = {name: error for name, (error, _) in told.items()}
                found.traces[n.name] = {name: trace for name, (_, trace) in told.items()}
                for source in used_up:
                    profiles.pop(source, None)
    found.alone = {name: run.alone for name, run in low.items()}
    found.pure = frozenset(name for name, run in low.items() if run.pure)
    found.blind = frozenset(n.name for n in reach(reference.lost, lambda n: n.all_input_nodes))
    return found


def working_set(capture: Capture) -> int:
    """Peak bytes for measuring the largest operation: FP32 and low values, gradients, comparisons."""

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
