"""How much each node's error moves the model's outputs: first-order, from a few vector-Jacobian products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from .execute import DTYPES
from .measure import Measurement
from .numerics.kernels import lowered, raised
from .numerics.metrics import output_error
from .records import Contribution

MAX_PROBES = 8
WANTED_ESTIMATES = 16
MAX_RERUNS = 96
_KINDS = ("isolated", "own", "cast")


def attribute(
    measurement: Measurement, seed: int = 0, tick: Callable[[str], None] = lambda name: None
) -> dict[str, dict[str, Contribution]]:
    """{node or placeholder: {format: Contribution}}: relative L2 of the outputs, unit 1.

    For a random sign vector v on the outputs, E<v, J d>^2 = ||J d||^2, where J d is what an error d of a node does to
    the outputs. One backward pass gives <v, J d> = <J^T v, d> for all nodes at once; with a batch, one independent
    estimate per sample. Nodes without a first-order answer (non-finite, or deciding a discrete result) are re-run:
    that node low, all else FP32.
    Source: Hutchinson, A stochastic estimator of the trace (1989).
    """
    estimates = _first_order(measurement, seed)
    result: dict[str, dict[str, Contribution]] = {}
    for name in measurement.live:
        result[name] = {fmt: estimates.contribution(name, fmt) for fmt in measurement.formats}
    replay = _Replay(measurement)
    for fmt in measurement.formats:
        for name in _undecided(measurement, fmt):
            tick(name)
            result[name][fmt] = _rerun(measurement, replay, name, fmt)
    return result


@dataclass
class _Estimates:
    """Running sums of squared inner products, per node, format and kind of error."""

    outputs_norm: float
    probes: int
    squares: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def contribution(self, name: str, fmt: str) -> Contribution:
        parts = {}
        for kind in _KINDS:
            square = self.squares.get((name, fmt, kind), 0.0) / max(self.probes, 1)
            parts[kind] = math.sqrt(square) / self.outputs_norm if self.outputs_norm else 0.0
        return Contribution(**parts)


def _first_order(measurement: Measurement, seed: int) -> _Estimates:
    outputs = [x for x in measurement.outputs if x.is_floating_point() and x.requires_grad]
    norm = math.sqrt(sum(float(_finite(x.detach()).double().square().sum()) for x in outputs))
    batch = _batch_size(outputs)
    probes = min(MAX_PROBES, max(2, math.ceil(WANTED_ESTIMATES / (batch or 1)))) if outputs else 0
    estimates = _Estimates(norm, probes)
    handles = [
        leaf.register_hook(_Hook(measurement, estimates, name, index, batch))
        for name, leaves in measurement.live.items()
        for index, leaf in enumerate(leaves)
        if leaf.is_floating_point() and leaf.requires_grad
    ]
    generator = torch.Generator().manual_seed(seed)
    try:
        for probe in range(probes):
            signs = [torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for x in outputs]
            # Masked entries hold infinities on purpose; nothing can move them.
            weights = [torch.where(torch.isfinite(x.detach()), s, torch.zeros_like(s)) for x, s in zip(outputs, signs, strict=True)]
            torch.autograd.backward(outputs, weights, retain_graph=probe < probes - 1)
    finally:
        for handle in handles:
            handle.remove()
        for value in measurement.flat_inputs:
            if isinstance(value, torch.Tensor):
                value.grad = None
    return estimates


class _Hook:
    """Turns the gradient at one value into squared inner products with its errors."""

    def __init__(self, measurement: Measurement, estimates: _Estimates, name: str, index: int, batch: int | None) -> None:
        self.measurement, self.estimates, self.name, self.index, self.batch = measurement, estimates, name, index, batch

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # an output of a several-output operation that nothing reads
            return
        with torch.no_grad():
            gradient = _finite(gradient.detach())
            for fmt, kind, error in self._errors():
                if error.shape != gradient.shape:
                    continue
                product = gradient * error.to(gradient.dtype)
                samples = product.dim() > 0 and self.batch is not None and product.shape[0] == self.batch
                inner = product.flatten(1).sum(1) if samples and product.dim() > 1 else product if samples else product.sum()
                key = (self.name, fmt, kind)
                self.estimates.squares[key] = self.estimates.squares.get(key, 0.0) + float(inner.double().square().sum())

    def _errors(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        value = self.measurement.live[self.name][self.index].detach()
        traces = self.measurement.traces.get(self.name, {})
        for fmt in self.measurement.formats:
            yield fmt, "cast", _finite(value.to(DTYPES[fmt]).float() - value.float())
            trace = traces.get(fmt)
            if trace is not None and self.index < len(trace.isolated):
                yield fmt, "isolated", trace.isolated[self.index]
            if trace is not None and self.index < len(trace.own):
                yield fmt, "own", trace.own[self.index]


class _Replay:
    """The model's outputs with the value of one node replaced, all else FP32."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        graph = measurement.capture.graph_module.graph
        self.nodes = {node.name: node for node in graph.nodes}
        self.graph = nx.DiGraph((source.name, node.name) for node in graph.nodes for source in node.all_input_nodes)
        self.reference = [x.detach() for x in measurement.outputs]

    def error(self, name: str, value: object) -> float:
        """Error of the outputs against the reference; inf where a finite output turned non-finite."""
        changed = nx.descendants(self.graph, name) if name in self.graph else set()
        initial = {
            node: self.measurement.values[other]
            for other, node in self.nodes.items()
            if other not in changed and other in self.measurement.values
        }
        initial[self.nodes[name]] = value
        interpreter = fx.Interpreter(self.measurement.capture.graph_module, garbage_collect_values=False)
        with torch.no_grad():
            interpreter.run(*self.measurement.flat_inputs, initial_env=initial)
        leaves = [interpreter.env[self.nodes[output]] for output in self.measurement.capture.outputs]
        return output_error(self.reference, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def _undecided(measurement: Measurement, fmt: str) -> list[str]:
    """Nodes for which no first-order answer exists, those certain to matter first, at most MAX_RERUNS."""
    certain, near = [], []
    deciding = _deciding(measurement)
    for name, traces in measurement.traces.items():
        trace, error = traces[fmt], measurement.errors[name][fmt]
        if trace.low is None:
            continue
        if trace.broken or error.disagreement or _overflows(measurement, name, fmt):
            certain.append(name)
        elif name in deciding and error.local_error:
            near.append(name)
    return (certain + near)[:MAX_RERUNS]


def _overflows(measurement: Measurement, name: str, fmt: str) -> bool:
    span = measurement.ranges.get(name)
    return span is not None and not span.max_abs <= torch.finfo(DTYPES[fmt]).max


def _deciding(measurement: Measurement) -> set[str]:
    """Floating nodes at most three operations before a discrete result; all of them if no output is floating."""
    nodes = measurement.capture.nodes
    if not any(x.is_floating_point() for x in measurement.outputs):
        return {name for name, node in nodes.items() if node.floating}
    frontier = {name for name, node in nodes.items() if not node.floating and any(_is_float(nodes, i) for i in node.inputs)}
    frontier = {name for name in frontier if nodes[name].op.removeprefix("aten.").split(".")[0] not in _SHAPE_QUESTIONS}
    found: set[str] = set()
    for _ in range(3):
        frontier = {i for name in frontier for i in nodes[name].inputs if _is_float(nodes, i)}
        found |= frontier
    return found


_SHAPE_QUESTIONS = frozenset({"isnan", "isinf", "isfinite", "sym_size", "zeros_like", "ones_like"})



def _is_float(nodes: Mapping[str, object], name: str) -> bool:
    return name in nodes and bool(getattr(nodes[name], "floating", False))


def _rerun(measurement: Measurement, replay: _Replay, name: str, fmt: str) -> Contribution:
    isolated = replay.error(name, raised(measurement.traces[name][fmt].low))
    cast = isolated
    if measurement.capture.nodes[name].floating:
        cast = replay.error(name, raised(lowered(measurement.values[name], DTYPES[fmt])))
    return Contribution(isolated=isolated, own=isolated, cast=cast, decided_by="re-run")


def _batch_size(outputs: list[torch.Tensor]) -> int | None:
    sizes = {x.shape[0] if x.dim() else None for x in outputs}
    return sizes.pop() if len(sizes) == 1 else None


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
