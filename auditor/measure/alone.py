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
from ..numerics.histogram import Deviation, Profile
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
    row = FORMATS[fmt]
    mask_values = _mask_values(capture, fmt)

    def convert(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = round_tree(x, row)
        if x.dtype is not torch.float32:
            return result
        for in_fp32, in_low in mask_values.items():
            replaced = torch.where(x == in_fp32, torch.full_like(result, in_low), result)
            result = in_format(replaced, row)
        return result

    return lambda tree: over_tensors(convert, tree)


def _mask_values(capture: Capture, fmt: str) -> dict[float, float]:
    """{number that an operation gets in FP32: the number that the model's code derives from the format instead}."""
    graph_nodes = {n.name: n for n in capture.graph_module.graph.nodes}
    result = dict[float, float]()
    for name, node in capture.nodes.items():
        literals = low_literals(node, fmt)
        if literals is None:
            continue
        n = graph_nodes[name]
        for key, in_low in literals.arguments.items():
            in_fp32 = n.args[key] if isinstance(key, int) else n.kwargs.get(key)
            if isinstance(in_low, (int, float)) and isinstance(in_fp32, (int, float)):
                result[float(in_fp32)] = float(in_low)
    return result


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


_ROUNDED_REFERENCE = Trace("rounding", "none")
"""The result in the format equals the FP32 result, rounded."""


@dataclass(frozen=True)
class IsolatedResult:
    """Result of a node that ran separately in a format, or the reason why it cannot run.

    exact: the FP32 result on the same rounded inputs; None if not requested, for operations that only move entries, and
    for emulated products that only round their result.
    """

    low: Any = None
    exact: Any = None
    unsupported: str | None = None
    cause: str = "unsupported"


def trace_of(n: fx.Node, reference: Any, result: IsolatedResult, by_inputs: bool) -> Trace:
    """Find the sources of a node's errors. by_inputs: whether each input's rounding can be estimated separately."""
    if result.low is None:
        return Trace()
    if view_source(n) is not None:
        return _ROUNDED_REFERENCE
    own = _own_error(n, result)
    if own == "none" and _agree(reference, result.low):
        return _ROUNDED_REFERENCE
    is_estimated = by_inputs and is_product(target_of(n))
    return Trace("inputs" if is_estimated else "run", own)


def _own_error(n: fx.Node, result: IsolatedResult) -> Error:
    """The source of a node's error on its rounded inputs; without an exact result, the operation's row decides."""
    is_quantized = any(x.is_quantized for x in tensors_in(result.low))  # integers with a scale
    if result.exact is not None and not is_quantized:
        return _difference(result.exact, result.low)
    return "none" if row_of(n).exact else "rounding"


def _difference(exact: Any, low: Any) -> Error:
    """The source of the difference between a low-precision result and the exact result."""
    wide = tensors_in(exact)
    local = tensors_in(low)
    try:
        if same_shapes(wide, local) and _agree(exact, low):
            return "none" if _agree(exact, low, rounded=False) else "rounding"
        rounded = [_like(x, result) for x, result in zip(wide, local, strict=True)]
        own_error = output_error(wide, local)
        rounding_error = output_error(wide, rounded)
    except MeasureError:  # a sparse result that lost entries
        return "run"
    if own_error > _ONE_ROUNDING * rounding_error:
        return "run"
    return "rounding" if own_error else "none"


def _agree(reference: Any, local: Any, *, rounded: bool = True) -> bool:
    """Whether a low-precision result equals the reference at every entry. rounded: round the reference first."""
    for wide, low in zip(tensors_in(reference), tensors_in(local), strict=True):
        for wide_part, low_part in runs(entries(wide), entries(low)):
            dtype = wide_part.dtype
            expected = wide_part
            if rounded:
                expected = entries(_like(wide_part, low)).to(dtype)
            if not torch.equal(expected, low_part.to(dtype)):
                return False
    return True


def _like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The tensor rounded to the format of the result; real numbers stay real even if the result is complex."""
    if result.is_complex() and not x.is_complex():
        return x.to(result.dtype.to_real())
    return like(x, result)


def same_shapes(a: Any, b: Any) -> bool:
    """Whether the tensors of two results have equal shapes; sparse tensors must also store equally many entries."""
    return [extent(x) for x in tensors_in(a)] == [extent(x) for x in tensors_in(b)]


class LowPrecisionProbe:
    """Measures each node in one format right after its FP32 reference, and runs the whole model in the format.

    A node runs twice in the format: alone, on its FP32 inputs rounded (`run`), and in the run of the whole model, on
    the low-precision results of the nodes before it (`advance`). It runs once where both have the same inputs.

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
        self.row = FORMATS[format]
        self.env: dict[fx.Node, Any] = {}
        self.pure = True
        self._round = rounder(capture, format)
        self._nodes = capture.nodes
        self._values = values
        self._profiles = profiles
        self._by_inputs = by_inputs
        self._deciding = deciding_nodes(capture)
        self._guarding = guarding_nodes(capture)
        self._recurrent_results: dict[str, IsolatedResult] = {}
        self._rounded: dict[fx.Node, Any] = {}  # FP32 results, rounded: the inputs of isolated runs
        self._propagated: dict[str, float] = {}
        self._diverged: set[fx.Node] = set()  # in `env`: discrete results that differ, and errors that are not finite

    def measure(self, n: fx.Node, sample: Sample | None = None) -> tuple[NodeError, Trace]:
        """Measure the node in the format, alone and with the whole model in the format. If the node fails, the
        NodeError gives the reason. sample: rows and columns of a product."""
        results = tensors_in(self._values[n.name])
        inputs = tensors_in([self._values.get(source.name) for source in n.all_input_nodes])
        reason = None
        if any(x.is_quantized for x in (*inputs, *results)):
            reason = f"{op_of(n)} computes with quantized integers"
        elif not any(x.device.type == "meta" for x in results):
            try:
                return self._measure_node(n, sample)
            except Exception as failure:  # a user-defined operation may return anything
                let_through(failure)
                reason = f"{op_of(n)} cannot be compared with FP32: {first_line(failure)[:160]}"
        if n not in self.env:
            self.advance(n)
        return NodeError(unsupported=reason, cause="unsupported" if reason else None), Trace()

    def run(self, n: fx.Node, inputs: tuple[Any, Any], with_exact: bool = True) -> IsolatedResult:
        """Run the node in the format on inputs that are already rounded. with_exact: also compute the FP32 result on
        these inputs, unless the operation rounds only once."""
        target = target_of(n)
        try:
            return self._run_with_exact(n, inputs) if with_exact else IsolatedResult(self._compute(n, *inputs))
        except UnsupportedInFormat as error:
            cause = "literal" if error.literal else "unsupported"
            return IsolatedResult(unsupported=str(error), cause=cause)
        except Exception as error:  # rounding the inputs can already break an operation, for instance a factorisation
            let_through(error)
            return IsolatedResult(unsupported=f"{operation_of(target).name}: {first_line(error)[:160]}")

    def _run_with_exact(self, n: fx.Node, inputs: tuple[Any, Any]) -> IsolatedResult:
        target = target_of(n)
        low, exact, roundings = run_with_exact(target, *self._with_literals(n, *inputs))
        is_rounded_product = roundings == 1 and is_tensor_core(target)
        if is_rounded_product or view_source(n) is not None or row_of(n).exact:
            return IsolatedResult(low)
        if exact is None:
            args, kwargs = inputs
            exact = wait_for_result(target, target(*widen(args), **widen(kwargs)))
        return IsolatedResult(low, exact)

    def _compute(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run the node in the format."""
        return run_op(target_of(n), *self._with_literals(n, args, kwargs))

    def _with_literals(self, n: fx.Node, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, in which constants such as torch.finfo(dtype).min have this format's values."""
        return with_literals(args, kwargs, low_literals(self._nodes[n.name], self.row.name))

    def errors(self, n: fx.Node, trace: Trace, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the errors of the result's tensor `index` that only a run gives, as pairs (name of an Error, values)."""
        if "run" not in (trace.own, trace.isolated):
            return
        result = self._recurrent_results.get(n.name)
        if result is None:
            inputs = fx.node.map_arg((n.args, n.kwargs), self.low_value)
            result = self.run(n, inputs, with_exact=trace.own == "run")
        low = tensors_in(result.low)[index].float()
        if trace.own == "run":
            exact = tensors_in(result.exact)[index]
            yield "own", low - exact
        if trace.isolated == "run":
            reference = tensors_in(self._values[n.name])[index]
            yield "isolated", low - reference

    def low_value(self, source: fx.Node) -> Any:
        """A node's value rounded to the format; weights and inputs contain no mask values to replace."""
        value = self._values[source.name]
        return self._round(value) if source.op == "call_function" else round_tree(value, self.row)

    def _rounded_value(self, source: fx.Node) -> Any:
        """An FP32 value rounded to the format; cached until `forget` frees it."""
        if source not in self._rounded:
            is_result = source.op == "call_function"
            self._rounded[source] = self.low_value(source) if is_result else self.value_of(source)
        return self._rounded[source]

    def value_of(self, source: fx.Node) -> Any:
        """A node's result with the whole model in the format; weights and inputs are rounded when first read."""
        if source not in self.env:
            self.env[source] = round_tree(self._values[source.name], self.row)
        return self.env[source]

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
        if any(x.dtype is torch.float32 and carried_in(x) is None for x in tensors_in(result)):
            self.pure = False
        self.env[n] = result

    def _measure_node(self, n: fx.Node, sample: Sample | None) -> tuple[NodeError, Trace]:
        result = self.run(n, fx.node.map_arg((n.args, n.kwargs), self._rounded_value))
        # Both runs have the same inputs as long as the low-precision results only equal the FP32 results, rounded.
        same_inputs = all(self._rounded[source] is self.env.get(source) for source in n.all_input_nodes)
        self.advance(n, result.low if same_inputs else None)

        error = self._with_origin(n, result, self._error(n, result, sample))
        if error.propagated_error is not None:
            self._propagated[n.name] = error.propagated_error

        trace = Trace()
        if error.unsupported is None:
            trace = trace_of(n, self._values[n.name], result, n.name in self._by_inputs)
        if same_inputs and self.pure and trace == _ROUNDED_REFERENCE:
            self._rounded[n] = self.env[n]
        if row_of(n).recurrent:  # slow to run again; the result is smaller than its steps
            self._recurrent_results[n.name] = result
        return error, replace(trace, broken=self._is_broken(n, error), near=n.name in self._deciding)

    def _error(self, n: fx.Node, result: IsolatedResult, sample: Sample | None) -> NodeError:
        """The node's errors in both runs. Only its first tensor is compared, unless the results are discrete."""
        reference = tensors_in(self._values[n.name])
        if not reference:
            return NodeError(unsupported=result.unsupported)
        if result.unsupported is None and not same_shapes(reference, result.low):
            result = replace(result, unsupported="its shape depends on the precision")
        if not is_number(reference[0]):
            return self._discrete_error(n, result)
        propagated = self._propagated_error(n)
        if result.unsupported is not None:
            return NodeError(propagated_error=propagated, unsupported=result.unsupported, cause=result.cause)
        return self._isolated_error(n, result, propagated, sample)

    def _discrete_error(self, n: fx.Node, result: IsolatedResult) -> NodeError:
        """The share of the entries that differ from FP32's, of a result such as a comparison or indices."""
        reference = tensors_in(self._values[n.name])
        if _disagreement(reference, tensors_in(self.env[n])):
            self._diverged.add(n)
        if result.unsupported is not None:
            return NodeError(unsupported=result.unsupported, cause=result.cause)
        share = _disagreement(reference, tensors_in(result.low))
        return NodeError(disagreement=share, cause="discrete" if share else None)

    def _propagated_error(self, n: fx.Node) -> float:
        """Relative L2 error of the node's result with the whole model in the format."""
        profile = self._profiles[n]
        source = view_source(n)
        if source is not None and source.name in self._propagated:
            error = self._propagated[source.name]
        elif source is not None and source.op != "call_function":  # a view of a weight or an input
            error = profile.rounding(self.row).error
        else:
            low = tensors_in(self.env[n])[0]
            error = profile.error(entries(low))
        if not error < math.inf:
            self._diverged.add(n)
        return error

    def _isolated_error(
        self, n: fx.Node, result: IsolatedResult, propagated: float, sample: Sample | None
    ) -> NodeError:
        """The error of a node that ran alone, with its cause."""
        profile = self._profiles[n]
        if view_source(n) is None:
            low = tensors_in(result.low)[0]
            deviation = profile.deviation(entries(low), self.row)
        else:
            deviation = profile.rounding(self.row)
        return NodeError(
            local_error=deviation.error,
            propagated_error=propagated,
            overflow=deviation.overflow,
            nan=deviation.nan,
            underflow=deviation.underflow,
            subnormal=deviation.subnormal,
            max_ulp=deviation.max_ulp,
            sqnr_db=sqnr_db(deviation.error),
            product=sample.split(self.row) if sample else None,
            cause=self._cause(n, deviation),
        )

    def _cause(self, n: fx.Node, deviation: Deviation) -> str | None:
        profiles = self._profiles
        inputs = [profiles[source] for source in n.all_input_nodes if source in profiles]
        divisor = next((profiles.get(source) for source in divisors(n)), None)
        is_divisor = any(n in divisors(user) for user in n.users)
        return cause_of(op_of(n), deviation, self.row, profiles[n], inputs, divisor, is_divisor)

    def _with_origin(self, n: fx.Node, result: IsolatedResult, error: NodeError) -> NodeError:
        """The error; if the node fails, changes a decision, or makes Inf or NaN, with whether this originates here."""
        fails = bool(result.unsupported or error.disagreement)
        if not (fails or _turns_non_finite(error) or self._turns_non_finite_in_low_run(n)):
            return error
        is_inherited = any(source in self._diverged for source in n.all_input_nodes)
        return replace(error, originates_here=not is_inherited)

    def _turns_non_finite_in_low_run(self, n: fx.Node) -> bool:
        """Whether the result with the whole model in the format is Inf or NaN where FP32's is finite."""
        if n not in self._diverged:
            return False
        for reference, low in zip(tensors_in(self._values[n.name]), tensors_in(self.env[n]), strict=False):
            if is_number(reference):
                turned = entries(reference).isfinite() & ~entries(low).isfinite()
                if turned.any():
                    return True
        return False

    def _is_broken(self, n: fx.Node, error: NodeError) -> bool:
        """The value of `Trace.broken`."""
        profile = self._profiles.get(n)
        overflows = profile is not None and not profile.range.max_abs <= self.row.largest  # NaN counts
        vanishes = bool(error.underflow) and n.name in self._guarding
        return _turns_non_finite(error) or overflows or bool(error.disagreement) or vanishes


def _turns_non_finite(error: NodeError) -> bool:
    """Whether an operation turned finite entries into Inf or NaN."""
    return bool(error.overflow or error.nan)


def _disagreement(reference: Leaves, low: Leaves) -> float:
    """The largest share of differing entries of any discrete tensor; 1 if a tensor has another shape."""
    largest = 0.0
    for expected, actual in zip(reference, low, strict=False):
        if is_number(expected):
            continue
        share = disagreement(expected, actual) if expected.shape == actual.shape else 1.0
        largest = max(largest, share)
    return largest
