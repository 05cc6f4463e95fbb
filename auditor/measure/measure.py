"""Test-running every node in every format against the FP32 reference, in one pass over the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..numerics.entries import entries, is_number, is_plain
from ..numerics.formats import format_of
from ..numerics.histogram import Profile
from ..numerics.nodes import tensors_of, viewed
from ..records import Batch, Capture, Magnitudes, NodeError
from .alone import Alone, Leaves, Trace
from .informat import InFormat
from .reference import TRUSTED, Back, Reference

AT_ONCE = 4
"""Times what an operation reads and gives that measuring it holds at once."""


@dataclass(frozen=True)
class Measurement:
    """The FP32 reference with its autograd graph, and what each format did to every node.

    values: detached FP32 result of every node and placeholder. live: the same values inside the autograd graph.
    anchors: leaves of that graph that stand behind results which depend on no float input.
    readings: {product: {value it reads: that value as this product alone reads it, or None if no other node reads it}}.
    blind: nodes from which some way to the outputs leads through an operation without a derivative. pure: formats in which
    the whole model ran low from the start.
    """

    capture: Capture
    formats: tuple[str, ...]
    flat_inputs: Sequence[Any]
    values: Mapping[str, Any]
    live: Mapping[str, Leaves]
    errors: Mapping[str, Mapping[str, NodeError]]
    traces: Mapping[str, Mapping[str, Trace]]
    ranges: Mapping[str, Magnitudes]
    outputs: Leaves
    anchors: Leaves
    readings: Mapping[str, Mapping[str, torch.Tensor | None]]
    blind: frozenset[str]
    pure: frozenset[str]
    alone: Mapping[str, Alone]

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """Of the graph, by name."""
        return {n.name: n for n in self.capture.graph_module.graph.nodes}

    @property
    def weights(self) -> set[str]:
        """Names of the placeholders that are parameters."""
        return {placeholder.name for placeholder in self.capture.placeholders if placeholder.kind == "parameter"}


def measure(
    capture: Capture,
    model: nn.Module,
    batch: Batch,
    formats: Sequence[str],
    tick: Callable[[str], None] = lambda name: None,
    *,
    back: Back = TRUSTED,
) -> Measurement:
    """Run the reference once with autograd, and beside it each node alone in each format and one low run per format.

    The model's own tensors are read, never written: the graph runs on detached leaves. `tick` hears every node's name.
    back: see Reference; for models with an operation whose derivative raises.
    """
    flat = [_leaf(value) for value in capture.bind(model, batch)]
    run = _Measuring(capture, formats, tick, back)
    with torch.enable_grad():
        run.run(*flat)
    return Measurement(
        capture=capture,
        formats=tuple(formats),
        flat_inputs=flat,
        values=run.values,
        live=run.live,
        errors={name: {fmt: low.errors[name] for fmt, low in run.low.items()} for name in run.called},
        traces={name: {fmt: low.traces[name] for fmt, low in run.low.items()} for name in run.called},
        ranges=run.ranges,
        outputs=[leaf for name in capture.outputs for leaf in run.live.get(name, [])],
        anchors=run.anchors,
        readings=run.readings,
        blind=frozenset(n.name for n in before(run.lost)),
        pure=frozenset(name for name, low in run.low.items() if low.low.pure),
        alone={name: low.alone for name, low in run.low.items()},
    )


class _Measuring(Reference):
    """The reference run; it keeps every value and takes the formats along."""

    def __init__(self, capture: Capture, formats: Sequence[str], tick: Callable[[str], None], back: Back) -> None:
        super().__init__(capture.graph_module, back)
        self._tick = tick
        self.called: list[str] = []
        self.values: dict[str, Any] = {}
        self.live: dict[str, Leaves] = {}
        self.ranges: dict[str, Magnitudes] = {}
        self._profiles: dict[fx.Node, Profile] = {}
        self.low = {name: InFormat(capture, name, self.values, self._profiles, self.readings) for name in formats}

    def run_node(self, n: fx.Node) -> Any:
        """The FP32 result; what the formats do to the node is recorded on the way."""
        called = n.op == "call_function"
        if called:
            self._tick(n.name)
        reference = super().run_node(n)
        if n.op != "output":
            self._keep(n, reference)
        if called:
            self.called.append(n.name)
            used_up = self.user_to_last_uses.get(n, ())
            with torch.no_grad():
                for low in self.low.values():
                    low.measure(n)
                    low.forget(used_up)
            for source in used_up:
                self._profiles.pop(source, None)
        return reference

    def _keep(self, n: fx.Node, reference: Any) -> None:
        self.live[n.name] = tensors_of(reference)
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, reference)
        self.values[n.name] = detached
        real = next((entries(leaf) for leaf in tensors_of(detached) if is_number(leaf)), None)
        if real is None:
            return
        source = viewed(n)
        seen = self._profiles.get(source) if source is not None else None
        self._profiles[n] = seen or Profile(real)
        self.ranges[n.name] = self._profiles[n].range


def working_set(capture: Capture) -> int:
    """Bytes that the operation which reads and gives most takes to be measured: FP32 and low values, gradients, comparisons."""

    def size(n: fx.Node) -> int:
        values = tensors_of(n.meta.get("val"))
        return sum(x.numel() * max(x.element_size(), 4) for x in values if not x.is_nested)

    called = (n for n in capture.graph_module.graph.nodes if n.op == "call_function")
    return AT_ONCE * max((sum(map(size, {n, *n.all_input_nodes})) for n in called), default=0)


def before(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they depend on."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().clone() if value.is_inference() else value.detach()
    return value.requires_grad_() if format_of(value.dtype) is not None and is_plain(value) else value
