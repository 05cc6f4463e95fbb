"""Replays a graph under a plan and in FP32; finds errors, dtypes, and the first operation with Inf or NaN."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
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
from .execute import Executor, ValueOf, beside
from .policy import Policy, choice_from_scopes
from .resolve import resolve


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
    under, predicted, read = UnderPlan(), resolve(policy).nodes, dict[str, dict[str, None]]()
    for path in capture.paths or (ModelPath(capture, (batch,)),):
        errors, dtypes = dict[str, float](), dict[str, Dtypes]()
        low, reference = _both(path.capture, policy)
        try:
            with torch.no_grad():
                for n, result, expected in beside(low, reference, path.capture.bind(model, path.batches[0])):
                    if given := tensors_in(result):
                        typed = predicted.get(n.name)
                        cast = typed is not None and typed.kernel != typed.dtype  # explicitly, by the model's code
                        before = FORMATS[typed.kernel].dtype if typed is not None and cast else None
                        handed = policy.kernel_arguments(n, low.value_of)
                        dtypes[n.name] = _dtypes(n, policy, low.value_of, handed, before or given[0].dtype)
                        for source, x in zip(
                            pytree.tree_leaves((n.args, n.kwargs)), pytree.tree_leaves(handed), strict=False
                        ):
                            if isinstance(source, fx.Node) and isinstance(x, torch.Tensor):
                                read.setdefault(source.name, {})[dtype_name(x.dtype)] = None
                    both = isinstance(expected, torch.Tensor) and isinstance(result, torch.Tensor)
                    if both and expected.is_floating_point() and result.is_floating_point():
                        with suppress(MeasureError):  # shapes differ: no error is defined
                            errors[n.name] = relative_l2(expected, result)
        except Exception as error:
            let_through(error)
            return UnderPlan()
        under = UnderPlan({**errors, **under.errors}, {**dtypes, **under.dtypes})
    return replace(under, read={name: tuple(dtypes) for name, dtypes in read.items()})


def _both(capture: Capture, policy: Policy) -> tuple[Executor, Executor]:
    return Executor(capture.graph_module, policy), Executor(capture.graph_module, Policy.wide(policy.capture))


def _dtypes(n: fx.Node, policy: Policy, value_of: ValueOf, kernel: Any, output: torch.dtype) -> Dtypes:
    """Return the dtypes that an operation reads, and the dtype it computes in: torch's promotion of its floating-point
    tensors. Scalars and discrete tensors count only if there are no other tensors. kernel: arguments after casts."""
    read, handed = tensors_in(policy.converted_arguments(n, (n.args, n.kwargs), value_of)), tensors_in(kernel)
    floating = [x for x in handed if x.is_floating_point() or x.is_complex()] or handed
    deciding = [x.dtype for x in floating if x.dim()] or [x.dtype for x in floating]
    told = any(isinstance(x, torch.dtype) for x in (*n.args, *n.kwargs.values()))
    computed = output if told or not deciding else reduce(torch.promote_types, deciding)
    return Dtypes(tuple(dict.fromkeys(dtype_name(x.dtype) for x in read)), dtype_name(computed), dtype_name(output))


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
    turning = _NonFiniteTrace(capture, policy)
    try:
        with torch.no_grad():
            for n, result, expected in beside(*turning.runs, capture.bind(model, batch)):
                turning.compare(n, result, expected)
    except Exception as error:
        let_through(error)
    return turning.first


class _NonFiniteTrace:
    """Runs the graph in FP32 and in low precision, and tracks entries that became zero, negative, Inf or NaN."""

    def __init__(self, capture: Capture, policy: Policy) -> None:
        self.capture, self._policy, self._row = capture, policy, FORMATS[policy.format]
        self.runs = self._low, self._reference = _both(capture, policy)
        self._turned: dict[fx.Node, NonFinite] = {}
        self._nan: dict[str, NonFinite] = {}  # {input of the model: the first operation that turns NaN because of it}
        self._beginnings: dict[fx.Node, dict[str, _Beginning]] = {}

    @property
    def first(self) -> NonFinite | None:
        """The operation that made an output Inf or NaN; if outputs are finite, the first operation with Inf or NaN."""
        outputs = self.capture.graph_module.graph.output_node().all_input_nodes
        reaching = (self._turned[n] for n in outputs if n in self._turned)
        first = next(reaching, next(iter(self._turned.values()), None))
        return self._nan.get(first.begins, first) if first is not None else None

    def _overflowing_input(self, n: fx.Node) -> fx.Node | None:
        """An input of the model that `n` reads, and that is Inf as `n` reads it, though finite in FP32; or None."""
        for source in n.all_input_nodes:
            if source.name in self._policy.layout.inputs:
                args, kwargs = self._policy.kernel_arguments(n, self._low.value_of)
                original = tensors_in(self._reference.value_of(source))
                read = tensors_in(widen((args, kwargs)))
                for low, ours in ((x, y) for x in read for y in original if x.shape == y.shape):
                    if (low.isinf() & ours.isfinite() & (ours.abs() > self._row.largest)).any():
                        return source
        return None

    def compare(self, n: fx.Node, result: Any, expected: Any) -> None:
        """Compare a node's results in both runs; note where entries first became Inf, NaN, zero or negative."""
        for low, ours in _pairs(result, expected):
            turned = ours.isfinite() & ~low.isfinite()
            if turned.any():
                earlier = next((self._turned[source] for source in n.all_input_nodes if source in self._turned), None)
                at, value = self.capture.nodes[n.name], "NaN" if low[turned].isnan().any() else "Inf"
                here = n.name, at.owner, at.op, at.source, value
                given = self._overflowing_input(n) if earlier is None else None
                if given is not None:
                    earlier = NonFinite(*here, "overflow", given.name, "", INPUT, None)
                elif earlier is None:
                    begins, cause = self._upstream(n, ours, turned)
                    above = self.capture.nodes[begins]
                    earlier = NonFinite(*here, cause, above.name, above.owner, above.op, above.source)
                if earlier.begins_op == INPUT and value == "NaN":
                    begun = earlier.cause, earlier.begins, earlier.begins_owner, INPUT, None
                    self._nan.setdefault(earlier.begins, NonFinite(*here, *begun))
                self._turned[n] = earlier
                return
            for kind, wrong in WRONG.items():
                where = wrong(ours, low)
                if where.any():
                    found = self._handed_down(n, kind, where, n.all_input_nodes)
                    found = found or (n.name, self._cause(n, kind, ours, where))
                    self._beginnings.setdefault(n, {})[kind] = found

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
        if view_source(n) is not None or row_of(n).exact or row_of(n).reduces:
            return True
        if row_of(n).product or row_of(n).attention:
            return False
        for low, ours in _pairs(self._low.value_of(source), self._reference.value_of(source)):
            try:
                if (wrong(ours, low) & where).any():
                    return True
            except RuntimeError:  # shapes that do not broadcast
                return True
        return False

    def _cause(self, n: fx.Node, kind: str, expected: torch.Tensor, where: torch.Tensor) -> str:
        largest = float(expected[where].abs().max())
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
            if (result := self._handed_down(n, kind, turned, decides)) is not None:
                return result
        args, kwargs = widen(self._policy.kernel_arguments(n, self._low.value_of))
        try:
            wide = tensors_in(target_of(n)(*args, **kwargs))
        except Exception as error:
            let_through(error)
            wide = []
        # If the same arguments give Inf or NaN in FP32, rounding moved them out of the domain.
        outside = any(x.is_floating_point() and not entries(x).isfinite().all() for x in wide)
        return n.name, "rounding" if outside else "overflow"


def _pairs(low: Any, expected: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Floating-point tensors of two results that have equal shapes, as pairs in float32."""
    pairs = zip(tensors_in(widen(low)), tensors_in(widen(expected)), strict=False)
    return [(a, b) for a, b in pairs if b.is_floating_point() and is_plain(a) and is_plain(b) and a.shape == b.shape]
