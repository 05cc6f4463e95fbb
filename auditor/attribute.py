"""How much each node's error moves the model's outputs: first-order, from a few vector-Jacobian products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from .execute import DTYPES
from .fxnodes import viewed
from .measure import Measurement
from .numerics.kernels import lowered, raised
from .numerics.metrics import output_error
from .records import Contribution

MAX_PROBES = 8
WANTED_ESTIMATES = 8
LIGHT = 10_000_000
"""Elements of all results together up to which a backward pass costs next to nothing, and more are made."""

MAX_RERUNS = 96


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
    """Running sums of squared inner products, per node, format and kind of error.

    returned: {id of an output: its random signs in this pass}, the part of its gradient that no reader has.
    """

    outputs_norm: float
    probes: int
    squares: dict[tuple[str, str, str], float] = field(default_factory=dict)
    returned: dict[int, torch.Tensor] = field(default_factory=dict)

    def contribution(self, name: str, fmt: str) -> Contribution:
        isolated, own, cast = (self._relative(name, fmt, kind) for kind in ("isolated", "own", "cast"))
        return Contribution(isolated, own, cast)

    def _relative(self, name: str, fmt: str, kind: str) -> float:
        square = self.squares.get((name, fmt, kind), 0.0) / max(self.probes, 1)
        return math.sqrt(square) / self.outputs_norm if self.outputs_norm else 0.0


def _first_order(measurement: Measurement, seed: int) -> _Estimates:
    outputs = [x for x in measurement.outputs if x.is_floating_point() and x.requires_grad]
    norm = math.sqrt(sum(float(_finite(x.detach()).double().square().sum()) for x in outputs))
    batch = _batch_size(outputs)
    probes = _probes(measurement, batch) if outputs else 0
    estimates = _Estimates(norm, probes)
    viewed, sampled = _lone_views(measurement), _sampled(measurement, batch)
    handles = [
        leaf.register_hook(  # type: ignore[no-untyped-call]
            _Hook(measurement, estimates, name, index, batch if name in sampled else None)
        )
        for name, leaves in measurement.live.items()
        if name not in viewed
        for index, leaf in enumerate(leaves)
        if leaf.is_floating_point() and leaf.requires_grad
    ]
    generator = torch.Generator().manual_seed(seed)
    try:
        for probe in range(probes):
            signs = [torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for x in outputs]
            # Masked entries hold infinities on purpose; nothing can move them.
            weights = [
                torch.where(torch.isfinite(x.detach()), s, torch.zeros_like(s))
                for x, s in zip(outputs, signs, strict=True)
            ]
            estimates.returned = {id(x): weight for x, weight in zip(outputs, weights, strict=True)}
            torch.autograd.backward(outputs, weights, retain_graph=probe < probes - 1)
    finally:
        for handle in handles:
            handle.remove()
        for value in measurement.flat_inputs:
            if isinstance(value, torch.Tensor):
                value.grad = None
    for name, source in viewed.items():
        for fmt in measurement.formats:
            square = estimates.squares.get((source, fmt, "cast"), 0.0)
            estimates.squares |= {(name, fmt, "cast"): square, (name, fmt, "isolated"): square}
    return estimates


def _probes(measurement: Measurement, batch: int | None) -> int:
    elements = sum(x.numel() for leaves in measurement.live.values() for x in leaves)
    least = 8 if elements < LIGHT else 6
    return min(MAX_PROBES, max(least, math.ceil(WANTED_ESTIMATES / (batch or 1))))


def _sampled(measurement: Measurement, batch: int | None) -> set[str]:
    """Values with one part per sample, side by side: what is computed from inputs that have a row per sample."""
    inputs = {placeholder.name for placeholder in measurement.capture.placeholders if placeholder.kind == "input"}
    found = {name for name in inputs if any(x.dim() and x.shape[0] == batch for x in measurement.live.get(name, []))}
    for node in measurement.capture.graph_module.graph.nodes:
        if any(source.name in found for source in node.all_input_nodes):
            found.add(node.name)
    return found


def _lone_views(measurement: Measurement) -> dict[str, str]:
    """{view: what it views} where nothing else reads that value: both have the same gradient and the same rounding."""
    found = {}
    for node in measurement.capture.graph_module.graph.nodes:
        source = viewed(node)
        if source is not None and len(source.users) == 1 and len(measurement.live[source.name]) == 1:
            found[node.name] = source.name
    return found


class _Hook:
    """Turns the gradient at one value into squared inner products with its errors."""

    def __init__(
        self, measurement: Measurement, estimates: _Estimates, name: str, index: int, batch: int | None
    ) -> None:
        self.measurement, self.estimates, self.name, self.index, self.batch = measurement, estimates, name, index, batch

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # an output of a several-output operation that nothing reads
            return
        with torch.no_grad():
            gradient = gradient.detach()
            for fmt in self.measurement.formats:
                self._add(fmt, gradient)

    def _add(self, fmt: str, gradient: torch.Tensor) -> None:
        live = self.measurement.live[self.name][self.index]
        rounding = live.detach().to(DTYPES[fmt]) - live.detach()
        whole = cast = self._square(gradient, rounding)
        if id(live) in self.estimates.returned:  # an output stays as it is where its low readers round it
            cast = self._square(gradient - self.estimates.returned[id(live)], rounding)
        trace = self.measurement.traces.get(self.name, {}).get(fmt)
        found = {"cast": cast, "isolated": whole, "own": whole}
        if trace is not None:
            for kind, gaps in (("isolated", trace.isolated), ("own", trace.own)):
                if gaps is not None:
                    gap = gaps[self.index] if self.index < len(gaps) else None
                    found[kind] = self._square(gradient, gap.to(gradient.dtype)) if gap is not None else 0.0
        for kind, square in found.items():
            key = (self.name, fmt, kind)
            self.estimates.squares[key] = self.estimates.squares.get(key, 0.0) + square

    def _square(self, gradient: torch.Tensor, gap: torch.Tensor) -> float:
        """Sum over the samples of <gradient, gap>^2; over the whole tensor where it holds no samples."""
        if gap.shape != gradient.shape or not gap.numel():
            return 0.0
        rows = self.batch if self.batch and gap.dim() and gap.shape[0] % self.batch == 0 else 1
        # [b, 1, n] @ [b, n, 1]: one fused pass
        inner = torch.bmm(gradient.reshape(rows, 1, -1), gap.reshape(rows, -1, 1))
        square = float(inner.double().square().sum())
        if not math.isfinite(square):
            inner = (_finite(gradient) * _finite(gap)).reshape(rows, -1).sum(1)
            square = float(inner.double().square().sum())
        return square


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
    frontier = {
        name for name, node in nodes.items() if not node.floating and any(_is_float(nodes, i) for i in node.inputs)
    }
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
