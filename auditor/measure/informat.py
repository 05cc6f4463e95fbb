"""What one format does to every node, one after the other: its error alone and in a low run, and what attribution needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import first_line, let_through
from ..execution.execute import with_literals
from ..numerics.casting import carried_in, lowered
from ..numerics.entries import entries, is_number
from ..numerics.histogram import Profile
from ..numerics.kernels import run_op
from ..numerics.metrics import disagreement, sqnr_db
from ..numerics.nodes import op_of, row_of, target_of, tensors_of, viewed
from ..records import Capture, NodeError
from .alone import Alone, Leaves, Ran, Trace, same_shapes, trace_of
from .causes import Quotient, cause_of
from .deciding import deciding, divisors, guarding

_OTHER_SHAPE = "its shape depends on the precision"


class LowRun:
    """The run that is low from the start, node by node beside the reference.

    alone: holds the format, and the reference's results so far. env: results.
    pure: whether every floating result is low, and comes of the run itself.
    """

    def __init__(self, alone: Alone, values: Mapping[str, Any]) -> None:
        self._alone, self._values = alone, values
        self.env: dict[fx.Node, Any] = {}
        self.pure = True

    def advance(self, n: fx.Node) -> None:
        """The node in this run; where it cannot run, the run goes on from the reference."""
        reference = self._values[n.name]
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self.value_of)
        args, kwargs = with_literals(args, kwargs, self._alone.literals(n))
        try:
            result = run_op(target_of(n), args, kwargs)
        except Exception as error:
            let_through(error)
            result = None
        if result is None or not same_shapes(reference, result):
            result = lowered(reference, self._alone.row)
            self.pure = False
        single = any(x.dtype is torch.float32 and carried_in(x) is None for x in tensors_of(result))
        self.pure = self.pure and not single
        self.env[n] = result

    def value_of(self, source: fx.Node) -> Any:
        """What a node gave; weights and inputs are rounded when first read."""
        if source not in self.env:
            self.env[source] = lowered(self._values[source.name], self._alone.row)
        return self.env[source]


class InFormat:
    """Measures node after node in one format, right after the reference has run it.

    values, profiles: reference results and their magnitudes so far. by_inputs: products whose inputs' errors are told apart.
    """

    def __init__(
        self,
        capture: Capture,
        format: str,
        values: Mapping[str, Any],
        profiles: Mapping[fx.Node, Profile],
        by_inputs: Collection[str],
    ) -> None:
        self.alone = Alone(capture, format, values)
        self.low = LowRun(self.alone, values)
        self.errors: dict[str, NodeError] = {}
        self.traces: dict[str, Trace] = {}
        self._values, self._profiles, self._by_inputs = values, profiles, by_inputs
        self._deciding, self._guarding = deciding(capture), guarding(capture)
        self._rounded: dict[fx.Node, Any] = {}
        self._spoilt: set[fx.Node] = set()

    def measure(self, n: fx.Node) -> None:
        """The node alone, and in the run that is low from the start; what cannot be compared has a reason instead."""
        try:
            self._measure(n)
        except Exception as error:  # an operation of the user's own may give anything
            let_through(error)
            reason = f"{op_of(n)} cannot be compared with FP32: {first_line(error)[:160]}"
            self._untold(n, NodeError(unsupported=reason, cause="unsupported"))

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Nothing will read these any more."""
        for node in nodes:
            self.low.env.pop(node, None)
            self._rounded.pop(node, None)

    def _untold(self, n: fx.Node, error: NodeError) -> None:
        """A node whose errors nobody can tell."""
        if n not in self.low.env:
            self.low.advance(n)
        self.errors[n.name], self.traces[n.name] = error, Trace()

    def _measure(self, n: fx.Node) -> None:
        given = [self._values.get(source.name) for source in n.all_input_nodes]
        if any(leaf.is_quantized for leaf in tensors_of((given, self._values[n.name]))):
            reason = f"{op_of(n)} computes with quantised integers"
            self._untold(n, NodeError(unsupported=reason, cause="unsupported"))
            return
        if any(leaf.device.type == "meta" for leaf in tensors_of(self._values[n.name])):
            self._untold(n, NodeError())
            return
        ran = self.alone.run(n, fx.node.map_arg((n.args, n.kwargs), self._read))
        self.low.advance(n)
        inherited = any(source in self._spoilt for source in n.all_input_nodes)
        error = self._error(n, ran)
        if ran.unsupported or error.disagreement or turned(error) or self._turns(n):
            error = replace(error, born=not inherited)
        self.errors[n.name] = error
        vanishes = bool(error.underflow) and n.name in self._guarding
        broken = turned(error) or self._overflows(n) or bool(error.disagreement) or vanishes
        told = error.unsupported is None
        trace = trace_of(n, self._values[n.name], ran, n.name in self._by_inputs) if told else Trace()
        self.traces[n.name] = replace(trace, broken=broken, near=n.name in self._deciding)
        if row_of(n).recurrent:  # step after step: dear to run, and small beside what its steps hold
            self.alone.kept[n.name] = ran

    def _read(self, source: fx.Node) -> Any:
        """A reference value rounded to the format, kept as long as others read it."""
        if source not in self._rounded:
            given = source.op != "call_function"
            self._rounded[source] = self.low.value_of(source) if given else self.alone.rounded(source)
        return self._rounded[source]

    def _overflows(self, n: fx.Node) -> bool:
        profile = self._profiles.get(n)
        return profile is not None and not profile.range.max_abs <= self.alone.row.largest

    def _error(self, n: fx.Node, ran: Ran) -> NodeError:
        ours = tensors_of(self._values[n.name])
        if not ours:
            return NodeError(unsupported=ran.unsupported)
        propagated = tensors_of(self.low.env[n])
        if not is_number(ours[0]):
            return self._discrete_error(n, ours, ran, propagated)
        profile, row = self._profiles[n], self.alone.row
        later = self._propagated_error(n, propagated[0])
        if not later < math.inf:
            self._spoilt.add(n)
        if ran.unsupported is not None or not same_shapes(ours, ran.low):
            reason = ran.unsupported or _OTHER_SHAPE
            return NodeError(propagated_error=later, unsupported=reason, cause="unsupported")
        viewing = viewed(n) is not None
        found = profile.rounding(row) if viewing else profile.deviation(entries(tensors_of(ran.low)[0]), row)
        inputs = [self._profiles[source] for source in n.all_input_nodes if source in self._profiles]
        divisor = next((self._profiles.get(source) for source in divisors(n)), None)
        quotient = Quotient(divisor, any(n in divisors(user) for user in n.users))
        return NodeError(
            local_error=found.error,
            propagated_error=later,
            overflow=found.damage.overflow,
            nan=found.damage.nan,
            underflow=found.damage.underflow,
            subnormal=found.damage.subnormal,
            max_ulp=found.max_ulp,
            sqnr_db=sqnr_db(found.error),
            cause=cause_of(op_of(n), found.damage, found.error, row, profile, inputs, quotient),
        )

    def _turns(self, n: fx.Node) -> bool:
        """Whether the run that is low from the start is Inf or NaN here where FP32 is finite: it need not be alone."""
        pairs = zip(tensors_of(self._values[n.name]), tensors_of(self.low.env[n]), strict=False)
        return n in self._spoilt and any(
            is_number(ours) and bool((entries(ours).isfinite() & ~entries(low).isfinite()).any()) for ours, low in pairs
        )

    def _propagated_error(self, n: fx.Node, low: torch.Tensor) -> float:
        profile, source = self._profiles[n], viewed(n)
        if source is not None:
            earlier = self.errors.get(source.name)
            known = earlier.propagated_error if earlier is not None else profile.rounding(self.alone.row).error
            if known is not None:
                return known
        return profile.error(entries(low))

    def _discrete_error(self, n: fx.Node, ours: Leaves, ran: Ran, propagated: Leaves) -> NodeError:
        if _disagreement(ours, propagated):
            self._spoilt.add(n)
        if ran.unsupported is not None or not same_shapes(ours, ran.low):
            return NodeError(unsupported=ran.unsupported or _OTHER_SHAPE, cause="unsupported")
        share = _disagreement(ours, tensors_of(ran.low))
        return NodeError(disagreement=share, cause="discrete" if share else None)


def turned(error: NodeError) -> bool:
    """Whether finite entries became Inf or NaN."""
    return bool(error.overflow or error.nan)


def _disagreement(ours: Leaves, theirs: Leaves) -> float:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if not is_number(a)]
    return max((disagreement(a, b) if a.shape == b.shape else 1.0 for a, b in pairs), default=0.0)
