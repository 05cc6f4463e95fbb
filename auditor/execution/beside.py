"""Replays a graph under a plan and in FP32; finds errors, dtypes, and the first operation with Inf or NaN."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..errors import MeasureError, let_through
from ..numerics.casting import widen
from ..numerics.entries import entries, is_plain
from ..numerics.formats import FORMATS, dtype_name
from ..numerics.metrics import relative_l2
from ..numerics.nodes import row_of, target_of, tensors_in, view_source
from ..records import Batch, Capture, Dtypes, ModelPath, NonFinite, Plan, ScopeChoice
from ..records.plan import INPUT
from .execute import Executor, ValueOf, run_pairwise
from .policy import Policy, choice_from_scopes
from .resolve import NodeType, resolve


@dataclass(frozen=True)
class UnderPlan:
    """Results of a replay under a plan, by node. errors: relative L2 error of each floating-point result against FP32.

    read: {parameter, buffer or input: the dtypes in which operations read it}.
    """

    errors: Mapping[str, float] = field(default_factory=dict)
    dtypes: Mapping[str, Dtypes] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def policy_of(capture: Capture, plan: Plan) -> Policy:
    """The Policy of a plan, from the plan's precision per module; plans that are exported programs have none."""
    return Policy(capture, plan.strategy, choice_from_scopes(plan.scopes), plan.format)


def scopes_of(policy: Policy) -> dict[str, ScopeChoice]:
    """The table of scopes of a plan with this Policy: the root, every module whose precision differs from that of the
    module above it, and every low-precision module with functions in FP32."""
    return {
        path: ScopeChoice(
            boundary.precision,
            output="keep" if boundary.keeps else "cast",
            keep=tuple(sorted(boundary.keep)),
            fp32_output=tuple(sorted(boundary.fp32_output)),
        )
        for path, boundary in policy.wrapped.items()
    }


def under_plan(capture: Capture, model: nn.Module, batch: Batch, plan: Plan | None) -> UnderPlan:
    """Return each node's error and dtypes under a plan, on `batch`, or on each path's first batch if there are several.

    A node whose shape changes has no error. The result is empty without a plan, for exported programs, and if an
    operation raises, for example because it does not support the format.
    """
    if plan is None or plan.program is not None:
        return UnderPlan()
    return under_policy(capture, model, batch, policy_of(capture, plan))


def under_policy(capture: Capture, model: nn.Module, batch: Batch, policy: Policy) -> UnderPlan:
    """Return each node's error and dtypes under a Policy, as `under_plan` does for a plan."""
    predicted = resolve(policy).nodes
    errors: dict[str, float] = {}
    dtypes: dict[str, Dtypes] = {}
    read: dict[str, dict[str, None]] = {}
    for path in capture.paths or (ModelPath(capture, (batch,)),):
        replay = _PolicyReplay(path.capture, policy, predicted)
        try:
            with torch.no_grad():
                replay.run(path.capture.bind(model, path.batches[0]))
        except Exception as error:
            let_through(error)
            return UnderPlan()
        errors = {**replay.errors, **errors}
        dtypes = {**replay.dtypes, **dtypes}
        for name, read_as in replay.read.items():
            read.setdefault(name, {}).update(read_as)
    return UnderPlan(errors, dtypes, {name: tuple(read_as) for name, read_as in read.items()})


class _PolicyReplay:
    """Replays one path's graph under a Policy and in FP32. errors, dtypes: as in UnderPlan. read: {value: {dtype in which
    operations read it: None}}, in the order of reading."""

    def __init__(self, capture: Capture, policy: Policy, predicted: Mapping[str, NodeType]) -> None:
        self.errors: dict[str, float] = {}
        self.dtypes: dict[str, Dtypes] = {}
        self.read: dict[str, dict[str, None]] = {}
        self._policy = policy
        self._predicted = predicted
        self._low, self._reference = _both(capture, policy)

    def run(self, inputs: Sequence[Any]) -> None:
        """Replay the graph on these inputs. Raises: what an operation raises."""
        for n, result, expected in run_pairwise(self._low, self._reference, inputs):
            tensors = tensors_in(result)
            if tensors:
                self._note_dtypes(n, tensors[0].dtype)
            if _is_floating_tensor(expected) and _is_floating_tensor(result):
                with suppress(MeasureError):  # shapes differ: no error is defined
                    self.errors[n.name] = relative_l2(expected, result)

    def _note_dtypes(self, n: fx.Node, output: torch.dtype) -> None:
        """Note the dtypes in which an operation reads, computes and returns. output: of its result."""
        predicted = self._predicted.get(n.name)
        if predicted is not None and predicted.kernel != predicted.dtype:  # the model's code casts the kernel's result
            output = FORMATS[predicted.kernel].dtype or output
        handed = self._policy.kernel_arguments(n, self._low.value_of)
        self.dtypes[n.name] = _dtypes(n, self._policy, self._low.value_of, handed, output)
        sources = pytree.tree_leaves((n.args, n.kwargs))
        for source, value in zip(sources, pytree.tree_leaves(handed), strict=False):
            if isinstance(source, fx.Node) and isinstance(value, torch.Tensor):
                self.read.setdefault(source.name, {})[dtype_name(value.dtype)] = None


def _is_floating_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _both(capture: Capture, policy: Policy) -> tuple[Executor, Executor]:
    """An executor of the graph under a Policy, and one in FP32."""
    low = Executor(capture.graph_module, policy)
    reference = Executor(capture.graph_module, Policy.wide(policy.capture))
    return low, reference


def _dtypes(n: fx.Node, policy: Policy, value_of: ValueOf, kernel: Any, output: torch.dtype) -> Dtypes:
    """Return the dtypes that an operation reads, and the dtype it computes in: torch's promotion of its floating-point
    tensors. Scalars and discrete tensors count only if there are no other tensors. kernel: arguments after casts."""
    read = tensors_in(policy.converted_arguments(n, (n.args, n.kwargs), value_of))
    handed = tensors_in(kernel)
    floating = [x for x in handed if x.is_floating_point() or x.is_complex()] or handed
    deciding = [x.dtype for x in floating if x.dim()] or [x.dtype for x in floating]
    asks_dtype = any(isinstance(x, torch.dtype) for x in (*n.args, *n.kwargs.values()))
    computed = output
    if deciding and not asks_dtype:
        computed = reduce(torch.promote_types, deciding)
    read_names = dict.fromkeys(dtype_name(x.dtype) for x in read)
    return Dtypes(tuple(read_names), dtype_name(computed), dtype_name(output))


Wrong = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(FP32 values, low-precision values) -> mask of the entries that low precision made zero or negative."""

WRONG: Mapping[str, Wrong] = {
    "vanished": lambda expected, low: (low == 0) & (expected != 0),
    "below zero": lambda expected, low: (low < 0) & (expected >= 0),
}


_Beginning = tuple[str, str]
"""(name of the operation at which entries became zero, negative, Inf or NaN; the cause)."""


def first_non_finite(capture: Capture, model: nn.Module, batch: Batch, policy: Policy) -> NonFinite | None:
    """Find the first operation in a replay that returns Inf or NaN where FP32 is finite; None if no operation does.

    If an output is Inf or NaN, only operations upstream of it count. If an operation raises, only earlier results are
    compared.
    """
    trace = _NonFiniteTrace(capture, policy)
    try:
        with torch.no_grad():
            for n, result, expected in run_pairwise(*trace.runs, capture.bind(model, batch)):
                trace.compare(n, result, expected)
    except Exception as error:
        let_through(error)
    return trace.first


class _NonFiniteTrace:
    """Runs the graph in FP32 and in low precision, and tracks entries that became zero, negative, Inf or NaN."""

    def __init__(self, capture: Capture, policy: Policy) -> None:
        self.capture = capture
        self._policy = policy
        self._row = FORMATS[policy.format]
        self._low, self._reference = _both(capture, policy)
        self.runs = (self._low, self._reference)
        self._turned: dict[fx.Node, NonFinite] = {}
        self._nan: dict[str, NonFinite] = {}  # {input of the model: the first operation that turns NaN because of it}
        self._beginnings: dict[fx.Node, dict[str, _Beginning]] = {}

    @property
    def first(self) -> NonFinite | None:
        """The operation that made an output Inf or NaN; if outputs are finite, the first operation with Inf or NaN."""
        outputs = self.capture.graph_module.graph.output_node().all_input_nodes
        reaching = [self._turned[n] for n in outputs if n in self._turned]
        candidates = reaching or list(self._turned.values())
        if not candidates:
            return None
        first = candidates[0]
        return self._nan.get(first.begins, first)

    def compare(self, n: fx.Node, result: Any, expected: Any) -> None:
        """Compare a node's results in both runs; note where entries first became Inf, NaN, zero or negative."""
        for low, reference in _pairs(result, expected):
            turned = reference.isfinite() & ~low.isfinite()
            if turned.any():
                value = "NaN" if low[turned].isnan().any() else "Inf"
                self._turned[n] = self._origin(n, value, reference, turned)
                return
            for kind, wrong in WRONG.items():
                where = wrong(reference, low)
                if where.any():
                    beginning = self._handed_down(n, kind, where, n.all_input_nodes)
                    if beginning is None:
                        beginning = (n.name, self._cause(n, kind, reference, where))
                    self._beginnings.setdefault(n, {})[kind] = beginning

    def _origin(self, n: fx.Node, value: str, reference: torch.Tensor, turned: torch.Tensor) -> NonFinite:
        """The operation at which the Inf or NaN of a node first occurred. turned: mask of the node's new Inf and NaN."""
        node = self.capture.nodes[n.name]
        here = partial(NonFinite, n.name, node.owner, node.op, node.source, value)
        origin = next((self._turned[source] for source in n.all_input_nodes if source in self._turned), None)
        if origin is None:
            origin = self._new_origin(n, here, reference, turned)
        if origin.begins_op == INPUT and value == "NaN":
            first_nan = here(origin.cause, origin.begins, origin.begins_owner, INPUT, None)
            self._nan.setdefault(origin.begins, first_nan)
        return origin

    def _new_origin(
        self, n: fx.Node, here: Callable[..., NonFinite], reference: torch.Tensor, turned: torch.Tensor
    ) -> NonFinite:
        """The NonFinite of a node whose inputs are finite, or are Inf only as it reads them."""
        model_input = self._overflowing_input(n)
        if model_input is not None:
            return here("overflow", model_input.name, "", INPUT, None)
        name, cause = self._upstream(n, reference, turned)
        begins = self.capture.nodes[name]
        return here(cause, begins.name, begins.owner, begins.op, begins.source)

    def _overflowing_input(self, n: fx.Node) -> fx.Node | None:
        """An input of the model that `n` reads, and that is Inf as `n` reads it, though finite in FP32; or None."""
        for source in n.all_input_nodes:
            if source.name in self._policy.layout.inputs and self._overflows_as_read(n, source):
                return source
        return None

    def _overflows_as_read(self, n: fx.Node, source: fx.Node) -> bool:
        """Whether an argument of the source's shape is Inf where the source is finite, and out of the format's range."""
        originals = tensors_in(self._reference.value_of(source))
        handed = self._policy.kernel_arguments(n, self._low.value_of)
        for low in tensors_in(widen(handed)):
            for original in originals:
                if low.shape != original.shape:
                    continue
                is_outside = original.isfinite() & (original.abs() > self._row.largest)
                if (low.isinf() & is_outside).any():
                    return True
        return False

    def _handed_down(
        self, n: fx.Node, kind: str, where: torch.Tensor, sources: Collection[fx.Node]
    ) -> _Beginning | None:
        """The upstream operation that made inputs of the entries `where` zero or negative, with the cause, or None."""
        for source in sources:
            result = self._beginnings.get(source, {}).get(kind)
            if result is not None and self._reaches(n, source, WRONG[kind], where):
                return result
        return None

    def _reaches(self, n: fx.Node, source: fx.Node, wrong: Wrong, where: torch.Tensor) -> bool:
        """Whether the entries `where` of a node may depend on an entry of `source` that became zero or negative."""
        row = row_of(n)
        if view_source(n) is not None or row.exact or row.reduces:
            return True
        if row.product or row.attention:
            return False
        for low, reference in _pairs(self._low.value_of(source), self._reference.value_of(source)):
            try:
                if (wrong(reference, low) & where).any():
                    return True
            except RuntimeError:  # shapes that do not broadcast
                return True
        return False

    def _cause(self, n: fx.Node, kind: str, expected: torch.Tensor, where: torch.Tensor) -> str:
        """cancellation | underflow | rounding: why the entries `where` became zero or negative at this operation."""
        largest = float(expected[where].abs().max())
        if kind == "vanished" and largest <= self._row.smallest_subnormal / 2:  # exact operands would give zero too
            return "underflow"
        read = [x for source in n.all_input_nodes for x in tensors_in(self._reference.value_of(source))]
        numbers = [x for x in read if x.is_floating_point() and is_plain(x) and x.numel()]
        if row_of(n).cancels and any(float(x.abs().max()) > 8 * largest for x in numbers):
            return "cancellation"
        return "underflow" if kind == "vanished" and largest < self._row.smallest_normal else "rounding"

    def _upstream(self, n: fx.Node, expected: torch.Tensor, turned: torch.Tensor) -> _Beginning:
        """Name of the operation that caused Inf or NaN in `n`, and the cause. The operation is upstream if inputs of
        `n` became zero or negative; else the operation is `n`."""
        if float(expected[turned].abs().max()) > self._row.largest:
            return n.name, "overflow"
        place = row_of(n).singular
        divisor = n.args[place] if place is not None and place < len(n.args) else None
        decides = [divisor] if isinstance(divisor, fx.Node) else n.all_input_nodes
        for kind in ("below zero", "vanished"):
            beginning = self._handed_down(n, kind, turned, decides)
            if beginning is not None:
                return beginning
        return n.name, "rounding" if self._is_non_finite_in_fp32(n) else "overflow"

    def _is_non_finite_in_fp32(self, n: fx.Node) -> bool:
        """Whether the arguments in low precision give Inf or NaN in FP32 too: rounding moved them out of the domain."""
        args, kwargs = widen(self._policy.kernel_arguments(n, self._low.value_of))
        try:
            results = tensors_in(target_of(n)(*args, **kwargs))
        except Exception as error:
            let_through(error)
            return False
        return any(x.is_floating_point() and not entries(x).isfinite().all() for x in results)


def _pairs(low: Any, expected: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Floating-point tensors of two results that have equal shapes, as pairs in float32."""
    pairs = []
    for a, b in zip(tensors_in(widen(low)), tensors_in(widen(expected)), strict=False):
        are_comparable = is_plain(a) and is_plain(b) and a.shape == b.shape
        if b.is_floating_point() and are_comparable:
            pairs.append((a, b))
    return pairs
