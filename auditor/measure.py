"""Test-running every node in every format against the FP32 reference, in one pass over the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .execute import DTYPES, with_literals
from .numerics.causes import cause_of
from .numerics.formats import FORMATS, Format
from .numerics.kernels import UnsupportedInFormat, is_tensor_core, lowered, packet_name, raised, run_op
from .numerics.metrics import damage, disagreement, max_ulp, relative_l2, sqnr_db
from .numerics.ranges import range_of
from .records import Batch, Capture, NodeError, NodeRange

Leaves = list[torch.Tensor]

# Normalisation by running statistics: autograd has no derivative for those, so what rounding them does is counted as
# the operation's own error.
_UNDIFFERENTIABLE = frozenset({"_native_batch_norm_legit_no_training"})


@dataclass
class Trace:
    """What attribution needs of one node in one format. isolated, own: low minus reference, as bfloat16, per leaf."""

    isolated: Leaves
    own: Leaves
    low: Any
    broken: bool


@dataclass
class Measurement:
    """The FP32 reference with its autograd graph, and what each format did to every node.

    values: detached FP32 result of every node and placeholder. live: the same values inside the autograd graph.
    """

    capture: Capture
    formats: tuple[str, ...]
    flat_inputs: list[Any]
    values: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Leaves] = field(default_factory=dict)
    errors: dict[str, dict[str, NodeError]] = field(default_factory=dict)
    traces: dict[str, dict[str, Trace]] = field(default_factory=dict)
    ranges: dict[str, NodeRange] = field(default_factory=dict)
    outputs: Leaves = field(default_factory=list)


def measure(
    capture: Capture,
    model: nn.Module,
    batch: Batch,
    formats: Sequence[str],
    tick: Callable[[str], None] = lambda name: None,
) -> Measurement:
    """Run the reference once with autograd, and beside it each node alone in each format and one low run per format.

    The model's own tensors are read, never written: the graph runs on detached leaves. `tick` hears every node's name.
    """
    copied = any(_mutates(node.target) for node in capture.graph_module.graph.nodes)
    flat = [_leaf(value, copied) for value in capture.bind(model, batch)]
    result = Measurement(capture, tuple(formats), flat)
    with torch.enable_grad():
        _Measuring(result, copied, tick).run(*flat)
    result.outputs = [leaf for name in capture.outputs for leaf in result.live.get(name, [])]
    return result


class _Measuring(fx.Interpreter):
    def __init__(self, result: Measurement, copied: bool, tick: Callable[[str], None]) -> None:
        super().__init__(result.capture.graph_module)
        self.result, self.copied, self.tick = result, copied, tick
        self.low: dict[str, dict[fx.Node, Any]] = {name: {} for name in result.formats}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        if n.op != "call_function":
            reference = super().run_node(n)
            for name in self.result.formats:
                self.low[name][n] = lowered(_detached(reference), DTYPES[name])
            self._keep(n, reference)
            return reference
        self.tick(n.name)
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self.fetch_args_kwargs_from_env(n))
        # Lowered before the reference runs: an in-place operation would change them under our feet.
        low_inputs = {name: (lowered(args, DTYPES[name]), lowered(kwargs, DTYPES[name])) for name in self.result.formats}
        reference = _connected(self._reference(n))
        self._keep(n, reference)
        with torch.no_grad():
            for name in self.result.formats:
                self._measure(n, name, _detached(reference), (args, kwargs), low_inputs[name])
        return reference

    def _reference(self, n: fx.Node) -> Any:
        if packet_name(n.target) == "detach":  # its value reaches the outputs, so its error must be attributed
            return torch.ops.aten.alias.default(self.env[n.args[0]])
        if packet_name(n.target) in _UNDIFFERENTIABLE:
            x, weight, bias, *statistics = n.args
            args = (*(self.env.get(node) for node in (x, weight, bias)), *_detached(fx.node.map_arg(statistics, self.env.get)))
            return n.target(*args, **n.kwargs)
        return super().run_node(n)

    def _keep(self, n: fx.Node, reference: Any) -> None:
        self.result.live[n.name] = _tensor_leaves(reference)
        detached = _detached(reference)
        self.result.values[n.name] = (
            pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, detached) if self.copied else detached
        )
        floats = [leaf for leaf in _tensor_leaves(detached) if leaf.is_floating_point()]
        if floats and n.op == "call_function":
            self.result.ranges[n.name] = range_of(floats[0])

    def _measure(self, n: fx.Node, name: str, reference: Any, inputs: Any, low_inputs: Any) -> None:
        literals = self.result.capture.constants.get(name, {}).get(n.name)
        local, own, unsupported = _local(n, low_inputs, literals, DTYPES[name])
        propagated, inherited = self._propagate(n, name, reference, literals)
        error = _node_error(n, FORMATS[name], reference, local, propagated, unsupported, inputs)
        broke = bool(error.overflow or error.nan or unsupported or error.disagreement)
        self.result.errors.setdefault(n.name, {})[name] = _with_birth(error, broke and not inherited)
        self.result.traces.setdefault(n.name, {})[name] = Trace(
            isolated=_difference(reference, local) if local is not None else [],
            own=_difference(reference, local) if packet_name(n.target) in _UNDIFFERENTIABLE and own else own,
            low=local,
            broken=bool(error.overflow or error.nan),
        )

    def _propagate(
        self, n: fx.Node, name: str, reference: Any, literals: Mapping[int | str, Any] | None
    ) -> tuple[Any, bool]:
        """The node in a run that is low from the start, and whether one of its inputs was already broken there."""
        env = self.low[name]
        args, kwargs = with_literals(*fx.node.map_arg((n.args, n.kwargs), env.__getitem__), literals)
        inherited = any(_broken(self.result.values[source.name], env[source]) for source in n.all_input_nodes)
        try:
            result = run_op(n.target, args, kwargs)
        except (UnsupportedInFormat, RuntimeError):
            result = None
        if result is None or not _same_shapes(reference, result):
            result = lowered(reference, DTYPES[name])  # the run goes on from the reference
        env[n] = result
        for source in self.user_to_last_uses.get(n, ()):
            env.pop(source, None)
        return result, inherited


def _local(
    n: fx.Node, low_inputs: Any, literals: Mapping[int | str, Any] | None, dtype: torch.dtype
) -> tuple[Any, Leaves, str | None]:
    """The node alone in the format: its result, what the operation itself added, and why it cannot run."""
    args, kwargs = low_inputs
    try:
        exact = n.target(*_fresh(raised(args)), **_fresh(raised(kwargs)))
    except Exception as error:  # rounding the inputs can already break an operation, for instance a factorisation
        return None, [], f"{packet_name(n.target)}: {str(error).splitlines()[0][:160]}"
    try:
        if is_tensor_core(n.target) and _on_cpu(args):
            local = lowered(exact, dtype)  # what run_op would compute a second time
        else:
            local = run_op(n.target, *with_literals(_fresh(args), _fresh(kwargs), literals))
    except UnsupportedInFormat as error:
        return None, [], str(error)
    except RuntimeError as error:
        return None, [], str(error).splitlines()[0][:160]
    return local, _difference(exact, local), None


def _node_error(
    n: fx.Node, fmt: Format, reference: Any, local: Any, propagated: Any, unsupported: str | None, inputs: Any
) -> NodeError:
    ours = _tensor_leaves(reference)
    if not ours:
        return NodeError(unsupported=unsupported)
    if unsupported is not None or not _same_shapes(reference, local):
        return NodeError(unsupported=unsupported or "its shape depends on the precision", cause="unsupported")
    theirs, later = _tensor_leaves(local), _tensor_leaves(propagated)
    if not ours[0].is_floating_point():
        share = max((disagreement(a, b) for a, b in zip(ours, theirs, strict=True) if not a.is_floating_point()), default=0.0)
        return NodeError(disagreement=share, cause="discrete" if share else None)
    r, c = ours[0], theirs[0]
    hurt = damage(r, c, fmt)
    error = _finite_error(r, c)
    return NodeError(
        local_error=error,
        propagated_error=_finite_error(r, later[0]),
        overflow=hurt.overflow,
        nan=hurt.nan,
        underflow=hurt.underflow,
        subnormal=hurt.subnormal,
        max_ulp=max_ulp(r, c, fmt),
        sqnr_db=sqnr_db(error),
        cause=cause_of(packet_name(n.target), hurt, error, fmt, r, _tensor_leaves(inputs)),
    )


def _finite_error(r: torch.Tensor, c: torch.Tensor) -> float:
    """Relative error over the entries where the reference is finite: masks hold infinities on purpose."""
    error = relative_l2(r, c)
    if math.isfinite(error) or bool(torch.isfinite(r).all()):
        return error
    finite = torch.isfinite(r)
    return relative_l2(r[finite], c[finite])


def _with_birth(error: NodeError, born: bool) -> NodeError:
    return NodeError(**{**error.__dict__, "born": born})


def _difference(reference: Any, candidate: Any) -> Leaves:
    """candidate - reference per floating leaf; zero where either is not finite. bfloat16: it enters inner products only."""
    result = []
    for r, c in zip(_tensor_leaves(reference), _tensor_leaves(candidate), strict=False):
        if not r.is_floating_point() or r.shape != c.shape:
            result.append(torch.zeros((), dtype=torch.bfloat16))
            continue
        gap = c.float() - r.float()
        result.append(torch.where(torch.isfinite(gap), gap, torch.zeros_like(gap)).bfloat16())
    return result


def _broken(reference: Any, low: Any) -> bool:
    for r, c in zip(_tensor_leaves(reference), _tensor_leaves(low), strict=False):
        if r.shape != c.shape or (not r.is_floating_point() and not torch.equal(r, c)):
            return True
        if r.is_floating_point() and not bool((torch.isfinite(c) | ~torch.isfinite(r)).all()):
            return True
    return False


def _leaf(value: Any, copied: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().clone() if copied else value.detach()
    return value.requires_grad_() if value.is_floating_point() else value


def _connected(reference: Any) -> Any:
    """Results that depend on no float input (positions, masks) are given a place in the autograd graph."""

    def connect(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point() and not x.requires_grad:
            return x.requires_grad_().clone()
        return x

    return pytree.tree_map_only(torch.Tensor, connect, reference)


def _fresh(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, tree)


def _detached(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _tensor_leaves(tree: Any) -> Leaves:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _same_shapes(a: Any, b: Any) -> bool:
    return [x.shape for x in _tensor_leaves(a)] == [x.shape for x in _tensor_leaves(b)]


def _on_cpu(tree: Any) -> bool:
    return all(leaf.device.type == "cpu" for leaf in _tensor_leaves(tree))


def _mutates(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
