"""Test-running every node in every format against the FP32 reference, in one pass over the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..formats.metrics import disagreement, sqnr_db
from ..formats.profile import Profile
from ..formats.table import FORMATS, format_of
from ..ops.casting import lowered
from ..ops.kernels import run_op
from ..ops.nodes import op_of, target_of, tensors_of, viewed
from ..records import Batch, Capture, Literals, Magnitudes, NodeError
from ..replay.execute import with_literals
from .causes import cause_of
from .discrete import deciding
from .reference import Reference
from .rounded import Rounder, rounder
from .singular import guarding, upstream
from .testrun import Alone, Leaves, Trace, run_alone, trace_of, turned


@dataclass
class Measurement:
    """The FP32 reference with its autograd graph, and what each format did to every node.

    values: detached FP32 result of every node and placeholder. live: the same values inside the autograd graph.
    anchors: leaves of that graph that stand behind results which depend on no float input.
    readings: {product: {value it reads: that value as this product alone reads it, or None if no other node reads it}}.
    """

    capture: Capture
    formats: tuple[str, ...]
    flat_inputs: list[Any]
    values: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Leaves] = field(default_factory=dict)
    errors: dict[str, dict[str, NodeError]] = field(default_factory=dict)
    traces: dict[str, dict[str, Trace]] = field(default_factory=dict)
    ranges: dict[str, Magnitudes] = field(default_factory=dict)
    outputs: Leaves = field(default_factory=list)
    anchors: Leaves = field(default_factory=list)
    readings: dict[str, dict[str, torch.Tensor | None]] = field(default_factory=dict)

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
    careful: bool = False,
) -> Measurement:
    """Run the reference once with autograd, and beside it each node alone in each format and one low run per format.

    The model's own tensors are read, never written: the graph runs on detached leaves. `tick` hears every node's name.
    careful: see Reference; for models with an operation whose derivative raises.
    """
    flat = [_leaf(value) for value in capture.bind(model, batch)]
    result = Measurement(capture, tuple(formats), flat)
    measuring = _Measuring(result, tick, careful)
    with torch.enable_grad():
        measuring.run(*flat)
    measuring.keep_low_results()
    result.anchors, result.readings = measuring.anchors, measuring.readings
    result.outputs = [leaf for name in capture.outputs for leaf in result.live.get(name, [])]
    return result


@dataclass
class _Low:
    """The state of one format's runs: rounded reference values, and the run that is low from the start."""

    round: Rounder
    rounded: dict[fx.Node, Any] = field(default_factory=dict)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    spoilt: set[fx.Node] = field(default_factory=set)


class _Measuring(Reference):
    def __init__(self, result: Measurement, tick: Callable[[str], None], careful: bool) -> None:
        super().__init__(result.capture.graph_module, careful)
        self.result, self.tick = result, tick
        self.deciding, self.guarding = deciding(result.capture), guarding(result.capture)
        self.profiles: dict[fx.Node, Profile] = {}
        self.low = {name: _Low(rounder(result.capture, name)) for name in result.formats}

    def run_node(self, n: fx.Node) -> Any:
        """The FP32 result; what the formats do to the node is recorded on the way."""
        if n.op == "output":
            return super().run_node(n)
        if n.op != "call_function":
            reference = super().run_node(n)
            self._keep(n, reference)
            return reference
        self.tick(n.name)
        reference = super().run_node(n)
        self._keep(n, reference)
        with torch.no_grad():
            for name, low in self.low.items():
                self._measure(n, name, low, self._rounded_inputs(n, low))
            self._forget(n)
        return reference

    def keep_low_results(self) -> None:
        """Of what stands shortly before an operation without a derivative: only a run can tell what an error does there."""
        for n in upstream(self.lost):
            for name, low in self.low.items():
                trace = self.result.traces.get(n.name, {}).get(name)
                error = self.result.errors.get(n.name, {}).get(name)
                if trace is None or error is None or trace.low is not None or not error.local_error:
                    continue
                values = {source: low.round(self.result.values[source.name]) for source in n.all_input_nodes}
                inputs = fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
                literals = self.result.capture.nodes[n.name].literals.get(name)
                with torch.no_grad():
                    trace.low = run_alone(n, inputs, literals, low.round.row).low

    def _keep(self, n: fx.Node, reference: Any) -> None:
        self.result.live[n.name] = tensors_of(reference)
        detached = _detached(reference)
        self.result.values[n.name] = detached
        real = next((_as_real(leaf) for leaf in tensors_of(detached) if _is_float(leaf) and not leaf.is_nested), None)
        if real is None:
            return
        source = viewed(n)
        seen = self.profiles.get(source) if source is not None else None
        self.profiles[n] = seen or Profile(real)
        self.result.ranges[n.name] = self.profiles[n].range

    def _rounded_inputs(self, n: fx.Node, low: _Low) -> tuple[Any, Any]:
        def rounded(source: fx.Node) -> Any:
            if source not in low.rounded:
                given = source.op != "call_function"
                value = self.result.values[source.name]
                low.rounded[source] = self._begun(source, low) if given else low.round(value)
            return low.rounded[source]

        args, kwargs = fx.node.map_arg((n.args, n.kwargs), rounded)
        return args, kwargs

    def _measure(self, n: fx.Node, name: str, low: _Low, inputs: tuple[Any, Any]) -> None:
        reference = self.result.values[n.name]
        literals = self.result.capture.nodes[n.name].literals.get(name)
        if any(leaf.is_nested for leaf in tensors_of((inputs, reference))):
            self._propagate(n, low, reference, literals)
            self.result.errors.setdefault(n.name, {})[name] = NodeError(cause="nested")
            self.result.traces.setdefault(n.name, {})[name] = Trace([], [])
            return
        alone = run_alone(n, inputs, literals, low.round.row)
        self._propagate(n, low, reference, literals)
        inherited = any(source in low.spoilt for source in n.all_input_nodes)
        error, gap = self._error(n, name, low, reference, alone)
        if alone.unsupported or error.disagreement or turned(error):
            error = replace(error, born=not inherited)
        self.result.errors.setdefault(n.name, {})[name] = error
        trace = trace_of(n, reference, alone, gap, n.name in self.readings)
        vanishes = bool(error.underflow) and n.name in self.guarding
        trace.certain = turned(error) or bool(error.disagreement) or self._overflows(n, name) or vanishes
        if trace.certain or (n.name in self.deciding and error.local_error):
            trace.low = alone.low
        self.result.traces.setdefault(n.name, {})[name] = trace

    def _overflows(self, n: fx.Node, name: str) -> bool:
        span = self.result.ranges.get(n.name)
        return span is not None and not span.max_abs <= FORMATS[name].largest

    def _error(
        self, n: fx.Node, name: str, low: _Low, reference: Any, alone: Alone
    ) -> tuple[NodeError, torch.Tensor | None]:
        local, unsupported = alone.low, alone.unsupported
        ours = tensors_of(reference)
        if not ours:
            return NodeError(unsupported=unsupported), None
        propagated = tensors_of(low.env[n])
        if not _is_float(ours[0]):
            return self._discrete_error(n, low, ours, local, propagated, unsupported), None
        profile, fmt = self.profiles[n], FORMATS[name]
        later = self._propagated_error(n, name, propagated[0])
        if not later < float("inf"):
            low.spoilt.add(n)
        if unsupported is not None or not _same_shapes(reference, local):
            reason = unsupported or "its shape depends on the precision"
            return NodeError(propagated_error=later, unsupported=reason, cause="unsupported"), None
        if viewed(n) is not None:
            found, gap = profile.rounding(fmt), None
        else:
            found, gap = profile.deviation(_as_real(tensors_of(local)[0]), fmt, keep=n.name not in self.readings)
        inputs = [self.profiles[source] for source in n.all_input_nodes if source in self.profiles]
        return NodeError(
            local_error=found.error,
            propagated_error=later,
            overflow=found.damage.overflow,
            nan=found.damage.nan,
            underflow=found.damage.underflow,
            subnormal=found.damage.subnormal,
            max_ulp=found.max_ulp,
            sqnr_db=sqnr_db(found.error),
            cause=cause_of(op_of(n), found.damage, found.error, fmt, profile, inputs),
        ), gap

    def _propagated_error(self, n: fx.Node, name: str, low: torch.Tensor) -> float:
        profile = self.profiles[n]
        source = viewed(n)
        if source is not None:
            earlier = self.result.errors.get(source.name, {}).get(name)
            known = earlier.propagated_error if earlier is not None else profile.rounding(FORMATS[name]).error
            if known is not None:
                return known
        return profile.error(_as_real(low), FORMATS[name])

    def _discrete_error(
        self, n: fx.Node, low: _Low, ours: Leaves, local: Any, propagated: Leaves, unsupported: str | None
    ) -> NodeError:
        if _disagreement(ours, propagated):
            low.spoilt.add(n)
        if unsupported is not None or not _same_shapes(ours, local):
            return NodeError(unsupported=unsupported or "its shape depends on the precision", cause="unsupported")
        share = _disagreement(ours, tensors_of(local))
        return NodeError(disagreement=share, cause="discrete" if share else None)

    def _propagate(self, n: fx.Node, low: _Low, reference: Any, literals: Literals | None) -> None:
        """The node in the run that is low from the start; where it cannot run, that run goes on from the reference."""
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda source: self._begun(source, low))
        args, kwargs = with_literals(args, kwargs, literals)
        try:
            result = run_op(target_of(n), args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            result = None
        if result is None or not _same_shapes(reference, result):
            result = lowered(reference, low.round.row)
        low.env[n] = result

    def _begun(self, source: fx.Node, low: _Low) -> Any:
        """A value of the run that is low from the start; weights and inputs are rounded when first read."""
        if source not in low.env:
            low.env[source] = lowered(self.result.values[source.name], low.round.row)
        return low.env[source]

    def _forget(self, n: fx.Node) -> None:
        for source in self.user_to_last_uses.get(n, ()):
            self.profiles.pop(source, None)
            for low in self.low.values():
                low.env.pop(source, None)
                low.rounded.pop(source, None)


def _disagreement(ours: Leaves, theirs: Leaves) -> float:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if not _is_float(a)]
    return max((disagreement(a, b) if a.shape == b.shape else 1.0 for a, b in pairs), default=0.0)


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().clone() if value.is_inference() else value.detach()
    return value.requires_grad_() if format_of(value.dtype) is not None else value


def _is_float(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _as_real(x: torch.Tensor) -> torch.Tensor:
    """Its entries as real numbers; of a sparse tensor, those that it holds."""
    if x.layout is torch.sparse_coo:
        x = x.coalesce().values()
    elif x.layout is not torch.strided:
        x = x.values()
    return torch.view_as_real(x) if x.is_complex() else x


def _detached(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _same_shapes(a: Any, b: Any) -> bool:
    ours, theirs = ([None if x.is_nested else x.shape for x in tensors_of(tree)] for tree in (a, b))
    return ours == theirs
