"""Runs each operation separately in a low-precision format on rounded FP32 inputs, and the whole model in that format;
compares both with FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from ..errors import MeasureError, first_line, let_through
from ..execution.execute import low_literals, with_literals
from ..numerics.casting import carried_in, in_format, like, round_tree, widen
from ..numerics.entries import entries, extent, is_number, over_tensors
from ..numerics.formats import FORMATS
from ..numerics.histogram import Profile
from ..numerics.kernels import UnsupportedInFormat, is_product, is_tensor_core, run_op, run_with_exact
from ..numerics.metrics import disagreement, output_error, runs, sqnr_db
from ..numerics.nodes import op_of, operation_of, row_of, target_of, tensors_in, view_source, wait_for_result
from ..records import Capture, NodeError
from .causes import cause_of, deciding_nodes, divisors, guarding_nodes
from .products import Sample

Leaves = list[torch.Tensor]
Error = Literal["none", "rounding", "inputs", "run"]
"""Source of an error. none: exact; rounding: only the FP32 result is rounded; inputs: the node's own error and the
rounding of its inputs, each estimated separately; run: only a run of the operation shows the error."""

_ONE_ROUNDING = 1.1


def rounder(capture: Capture, fmt: str) -> Callable[[Any], Any]:
    """Return a function that rounds the tensors in a tree to a format. Mask values, such as FP32's minimum, become the
    values that the model uses in that format."""
    nodes = {node.name: node for node in capture.graph_module.graph.nodes}
    row = FORMATS[fmt]
    sentinels = dict[float, float]()  # {mask value in FP32: mask value in the format}
    for name, node in capture.nodes.items():
        literals = low_literals(node, fmt)
        for key, value in literals.arguments.items() if literals else ():
            ours = nodes[name].args[key] if isinstance(key, int) else nodes[name].kwargs.get(key)
            if isinstance(value, (int, float)) and isinstance(ours, (int, float)):
                sentinels[float(ours)] = float(value)

    def convert(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = round_tree(x, row)
        for ours, theirs in sentinels.items() if x.dtype is torch.float32 else ():
            result = in_format(torch.where(x == ours, torch.full_like(result, theirs), result), row)
        return result

    return lambda tree: over_tensors(convert, tree)


@dataclass(frozen=True)
class Trace:
    """Sources of a node's errors in one format. isolated: error against the FP32 result; own: error against the exact
    result on the same rounded inputs.

    broken: the result overflowed, became non-finite, changed discrete entries, or underflowed in one of
    `guarding_nodes`. near: the node is one of `deciding_nodes`, shortly before a discrete result.
    """

    isolated: Error = "none"
    own: Error = "none"
    broken: bool = False
    near: bool = False


@dataclass(frozen=True)
class Ran:
    """Result of a node that ran separately in a format, or the reason why it cannot run.

    exact: the FP32 result on the same rounded inputs; None if not requested, for operations that only move entries, and
    for emulated products that only round their result.
    """

    low: Any = None
    exact: Any = None
    unsupported: str | None = None
    cause: str = "unsupported"


def trace_of(n: fx.Node, reference: Any, ran: Ran, by_inputs: bool) -> Trace:
    """Find the sources of a node's errors. by_inputs: whether each input's rounding can be estimated separately."""
    if ran.low is None:
        return Trace()
    if view_source(n) is not None:
        return Trace("rounding", "none")
    isolated: Error = "inputs" if by_inputs and is_product(target_of(n)) else "run"
    exact = row_of(n).exact
    if ran.exact is not None and not any(
        x.is_quantized for x in tensors_in(ran.low)
    ):  # quantized: integers with a scale
        if (own := _own_error(ran.exact, ran.low)) == "run":
            return Trace(isolated, "run")
        exact = own == "none"
    if exact:
        return Trace("rounding" if _agree(reference, ran.low) else isolated, "none")
    return Trace(isolated, "rounding")


def _agree(reference: Any, local: Any, *, rounded: bool = True) -> bool:
    """Whether a low-precision result equals the reference at every entry. rounded: round the reference first."""
    for wide, low in zip(tensors_in(reference), tensors_in(local), strict=True):
        for r, c in runs(entries(wide), entries(low)):
            if not torch.equal(entries(_like(r, low)).to(r.dtype) if rounded else r, c.to(r.dtype)):
                return False
    return True


def _like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The tensor rounded to the format of the result; real numbers stay real even if the result is complex."""
    return x.to(result.dtype.to_real()) if result.is_complex() and not x.is_complex() else like(x, result)


def _own_error(exact: Any, low: Any) -> Error:
    """The source of the difference between a low-precision result and the exact result."""
    wide, local = tensors_in(exact), tensors_in(low)
    try:
        if same_shapes(wide, local) and _agree(exact, low):
            return "none" if _agree(exact, low, rounded=False) else "rounding"
        own, rounding = (
            output_error(wide, c) for c in (local, [_like(e, x) for e, x in zip(wide, local, strict=True)])
        )
    except MeasureError:  # a sparse result that lost entries
        return "run"
    return "run" if own > _ONE_ROUNDING * rounding else "rounding" if own else "none"


def same_shapes(a: Any, b: Any) -> bool:
    """Whether the tensors of two results have equal shapes; sparse tensors must also store equally many entries."""
    ours, theirs = ([extent(x) for x in tensors_in(tree)] for tree in (a, b))
    return ours == theirs


class InFormat:
    """Measures each node in one format right after its FP32 reference, and runs the whole model in the format.

    values, profiles: FP32 results and their magnitudes so far. by_inputs: products whose input errors are estimated
    separately. env: results with the whole model in the format. pure: whether all floating-point results in `env` so
    far were computed in the format.
    """

    def __init__(
        self,
        capture: Capture,
        format: str,
        values: Mapping[str, Any],
        profiles: Mapping[fx.Node, Profile],
        by_inputs: Collection[str],
    ) -> None:
        self.row, self._round = FORMATS[format], rounder(capture, format)
        self.env: dict[fx.Node, Any] = {}
        self.pure = True
        self._nodes, self._values, self._profiles, self._by_inputs = capture.nodes, values, profiles, by_inputs
        self._deciding, self._guarding = deciding_nodes(capture), guarding_nodes(capture)
        self._kept: dict[str, Ran] = {}
        self._rounded: dict[fx.Node, Any] = {}
        self._propagated: dict[str, float] = {}
        self._spoilt: set[fx.Node] = set()

    def measure(self, n: fx.Node, sample: Sample | None = None) -> tuple[NodeError, Trace]:
        """Measure the node in the format, alone and with the whole model in the format. If the node fails, the
        NodeError gives the reason. sample: rows and columns of a product."""
        given = tensors_in([self._values.get(source.name) for source in n.all_input_nodes])
        results, reason = tensors_in(self._values[n.name]), None
        if any(leaf.is_quantized for leaf in (*given, *results)):
            reason = f"{op_of(n)} computes with quantized integers"
        elif not any(leaf.device.type == "meta" for leaf in results):
            try:
                return self._measure_node(n, sample)
            except Exception as failure:  # a user-defined operation may return anything
                let_through(failure)
                reason = f"{op_of(n)} cannot be compared with FP32: {first_line(failure)[:160]}"
        if n not in self.env:
            self.advance(n)
        return NodeError(unsupported=reason, cause="unsupported" if reason else None), Trace()

    def _compute(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run the node in the format. Constants such as torch.finfo(dtype).min have this format's values."""
        return run_op(target_of(n), *with_literals(args, kwargs, low_literals(self._nodes[n.name], self.row.name)))

    def low_value(self, source: fx.Node) -> Any:
        """A node's value rounded to the format; weights and inputs contain no mask values to replace."""
        value = self._values[source.name]
        return self._round(value) if source.op == "call_function" else round_tree(value, self.row)

    def run(self, n: fx.Node, inputs: tuple[Any, Any], beside: bool = True) -> Ran:
        """Run the node in the format on inputs that are already rounded. beside: also compute the FP32 result on these
        inputs, unless the operation rounds only once."""
        args, kwargs = inputs
        target = target_of(n)
        literals = low_literals(self._nodes[n.name], self.row.name)
        try:
            low, exact, roundings = run_with_exact(target, *with_literals(args, kwargs, literals))
            is_rounded_product = roundings == 1 and is_tensor_core(target)
            if not beside or is_rounded_product or view_source(n) is not None or row_of(n).exact:
                return Ran(low)
            if exact is None:
                exact = wait_for_result(target, target(*widen(args), **widen(kwargs)))
            return Ran(low, exact)
        except UnsupportedInFormat as error:
            return Ran(unsupported=str(error), cause="literal" if error.literal else "unsupported")
        except Exception as error:  # rounding the inputs can already break an operation, for instance a factorisation
            let_through(error)
            return Ran(unsupported=f"{operation_of(target).name}: {first_line(error)[:160]}")

    def errors(self, n: fx.Node, trace: Trace, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the errors of the result's tensor `index` that only a run gives, as pairs (name of an Error, values)."""
        if "run" not in (trace.own, trace.isolated):
            return
        ran = self._kept.get(n.name)
        ran = ran or self.run(n, fx.node.map_arg((n.args, n.kwargs), self.low_value), beside=trace.own == "run")
        low = tensors_in(ran.low)[index].float()
        if trace.own == "run":
            yield "own", low - tensors_in(ran.exact)[index]
        if trace.isolated == "run":
            yield "isolated", low - tensors_in(self._values[n.name])[index]

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Free the low-precision values of `nodes`; inputs and weights are rounded again when read later."""
        for node in nodes:
            self.env.pop(node, None)
            self._rounded.pop(node, None)

    def advance(self, n: fx.Node, result: Any = None) -> None:
        """Compute the node in the run of the whole model in the format; if the node fails, use its rounded FP32 result.
        result: the node's result, if known."""
        reference = self._values[n.name]
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self.value_of)
        try:
            if result is None:
                result = self._compute(n, args, kwargs)
        except Exception as error:
            let_through(error)
        if result is None or not same_shapes(reference, result):
            result = round_tree(reference, self.row)
            self.pure = False
        single = any(x.dtype is torch.float32 and carried_in(x) is None for x in tensors_in(result))
        self.pure = self.pure and not single
        self.env[n] = result

    def value_of(self, source: fx.Node) -> Any:
        """A node's result with the whole model in the format; weights and inputs are rounded when first read."""
        if source not in self.env:
            self.env[source] = round_tree(self._values[source.name], self.row)
        return self.env[source]

    def _measure_node(self, n: fx.Node, sample: Sample | None) -> tuple[NodeError, Trace]:
        ran = self.run(n, fx.node.map_arg((n.args, n.kwargs), self._read))
        begins = all(self._rounded[source] is self.env.get(source) for source in n.all_input_nodes)
        self.advance(n, ran.low if begins else None)
        inherited = any(source in self._spoilt for source in n.all_input_nodes)
        error = self._error(n, ran, sample)
        if ran.unsupported or error.disagreement or _turns_non_finite(error) or self._turns(n):
            error = replace(error, born=not inherited)
        if error.propagated_error is not None:
            self._propagated[n.name] = error.propagated_error
        vanishes = bool(error.underflow) and n.name in self._guarding
        profile = self._profiles.get(n)
        overflows = profile is not None and not profile.range.max_abs <= self.row.largest
        broken = _turns_non_finite(error) or overflows or bool(error.disagreement) or vanishes
        told = error.unsupported is None
        trace = trace_of(n, self._values[n.name], ran, n.name in self._by_inputs) if told else Trace()
        if begins and self.pure and trace == Trace("rounding", "none"):  # the low run still equals FP32, rounded
            self._rounded[n] = self.env[n]
        if row_of(n).recurrent:  # slow to run again; the result is smaller than its steps
            self._kept[n.name] = ran
        return error, replace(trace, broken=broken, near=n.name in self._deciding)

    def _read(self, source: fx.Node) -> Any:
        """An FP32 value rounded to the format; cached until `forget` frees it."""
        if source not in self._rounded:
            given = source.op != "call_function"
            self._rounded[source] = self.value_of(source) if given else self.low_value(source)
        return self._rounded[source]

    def _error(self, n: fx.Node, ran: Ran, sample: Sample | None) -> NodeError:
        ours = tensors_in(self._values[n.name])
        if not ours:
            return NodeError(unsupported=ran.unsupported)
        propagated, refused = tensors_in(self.env[n]), ran.unsupported
        if refused is None and not same_shapes(ours, ran.low):
            refused = "its shape depends on the precision"
        if not is_number(ours[0]):
            if _disagreement(ours, propagated):
                self._spoilt.add(n)
            if refused is not None:
                return NodeError(unsupported=refused, cause=ran.cause)
            share = _disagreement(ours, tensors_in(ran.low))
            return NodeError(disagreement=share, cause="discrete" if share else None)
        profile, row = self._profiles[n], self.row
        source = view_source(n)
        if source is not None and source.name in self._propagated:
            later = self._propagated[source.name]
        elif source is not None and source.op != "call_function":
            later = profile.rounding(row).error
        else:
            later = profile.error(entries(propagated[0]))
        if not later < math.inf:
            self._spoilt.add(n)
        if refused is not None:
            return NodeError(propagated_error=later, unsupported=refused, cause=ran.cause)
        low = entries(tensors_in(ran.low)[0])
        gap = profile.deviation(low, row) if source is None else profile.rounding(row)
        inputs = [self._profiles[source] for source in n.all_input_nodes if source in self._profiles]
        divisor = next((self._profiles.get(source) for source in divisors(n)), None)
        divides = any(n in divisors(user) for user in n.users)
        return NodeError(
            local_error=gap.error,
            propagated_error=later,
            overflow=gap.overflow,
            nan=gap.nan,
            underflow=gap.underflow,
            subnormal=gap.subnormal,
            max_ulp=gap.max_ulp,
            sqnr_db=sqnr_db(gap.error),
            product=sample.split(row) if sample else None,
            cause=cause_of(op_of(n), gap, row, profile, inputs, divisor, divides),
        )

    def _turns(self, n: fx.Node) -> bool:
        """Whether the result with the whole model in the format is Inf or NaN where FP32's is finite."""
        pairs = zip(tensors_in(self._values[n.name]), tensors_in(self.env[n]), strict=False)
        return n in self._spoilt and any(
            is_number(ours) and bool((entries(ours).isfinite() & ~entries(low).isfinite()).any()) for ours, low in pairs
        )


def _turns_non_finite(error: NodeError) -> bool:
    """Whether an operation turned finite entries into Inf or NaN."""
    return bool(error.overflow or error.nan)


def _disagreement(ours: Leaves, theirs: Leaves) -> float:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if not is_number(a)]
    return max((disagreement(a, b) if a.shape == b.shape else 1.0 for a, b in pairs), default=0.0)
