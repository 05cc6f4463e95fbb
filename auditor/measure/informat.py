"""What one format does to every node, one after the other: its error alone and in a low run, and what attribution needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import first_line
from ..numerics.entries import entries, is_number
from ..numerics.histogram import Profile
from ..numerics.metrics import disagreement, sqnr_db
from ..numerics.nodes import op_of, tensors_of, viewed
from ..raised import let_through
from ..records import Capture, NodeError
from .causes import Quotient, cause_of
from .lowrun import LowRun, same_shapes
from .singular import divisors
from .testrun import Again, Alone, Leaves, Trace, run_alone, trace_of, turned

_OTHER_SHAPE = "its shape depends on the precision"


class InFormat:
    """Measures node after node in one format, right after the reference has run it.

    values, profiles: reference results and their magnitudes so far. by_inputs: products whose inputs' errors are told
    apart. cheap: nodes that take little to be run once more. deciding: nodes shortly before a discrete result. guarding: those that keep a denominator from zero.
    """

    def __init__(
        self,
        capture: Capture,
        format: str,
        values: Mapping[str, Any],
        profiles: Mapping[fx.Node, Profile],
        by_inputs: Collection[str],
        cheap: Collection[str],
        deciding: Collection[str],
        guarding: Collection[str],
    ) -> None:
        self.low = LowRun(capture, format, values)
        self.errors: dict[str, NodeError] = {}
        self.traces: dict[str, Trace] = {}
        self._values, self._profiles, self._by_inputs = values, profiles, by_inputs
        self._cheap = cheap
        self._deciding, self._guarding = deciding, guarding
        self._spoilt: set[fx.Node] = set()

    def measure(self, n: fx.Node) -> None:
        """The node alone, and in the run that is low from the start; what cannot be compared has a reason instead."""
        try:
            self._measure(n)
        except Exception as error:  # an operation of the user's own may give anything
            let_through(error)
            reason = f"{op_of(n)} cannot be compared with FP32: {first_line(error)[:160]}"
            self._untold(n, NodeError(unsupported=reason, cause="unsupported"))

    def _untold(self, n: fx.Node, error: NodeError) -> None:
        """A node whose errors nobody can tell."""
        if n not in self.low.env:
            self.low.advance(n)
        self.errors[n.name], self.traces[n.name] = error, Trace([], [])

    def _measure(self, n: fx.Node) -> None:
        if any(leaf.is_quantized for leaf in tensors_of((self._given(n), self._values[n.name]))):
            reason = f"{op_of(n)} computes with quantised integers"
            self._untold(n, NodeError(unsupported=reason, cause="unsupported"))
            return
        if any(leaf.device.type == "meta" for leaf in tensors_of(self._values[n.name])):
            self._untold(n, NodeError())
            return
        inputs = self.low.rounded_inputs(n)
        alone = run_alone(n, inputs, self.low.literals(n), self.low.row)
        self.low.advance(n)
        inherited = any(source in self._spoilt for source in n.all_input_nodes)
        error = self._error(n, alone)
        if alone.unsupported or error.disagreement or turned(error) or self._turns(n):
            error = replace(error, born=not inherited)
        self.errors[n.name] = error
        self.traces[n.name] = self._trace(n, alone, error)

    def _given(self, n: fx.Node) -> list[Any]:
        return [self._values.get(source.name) for source in n.all_input_nodes]

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Nothing will read these any more."""
        self.low.forget(nodes)

    def _trace(self, n: fx.Node, alone: Alone, error: NodeError) -> Trace:
        by_inputs = n.name in self._by_inputs
        spared = n.name in self._cheap and alone.low is not None and not by_inputs
        trace = trace_of(n, self._values[n.name], alone, by_inputs or spared)
        if spared:
            again = Again(n, self._values, self.low.round, self.low.row, self.low.literals(n))
            trace = replace(trace, by_inputs=False, again=None if trace.isolated is None else again)
        vanishes = bool(error.underflow) and n.name in self._guarding
        infinite = turned(error) or self._overflows(n)
        broken = infinite or bool(error.disagreement) or vanishes
        return replace(trace, low=alone.low if infinite else None, broken=broken, near=n.name in self._deciding)

    def _overflows(self, n: fx.Node) -> bool:
        profile = self._profiles.get(n)
        return profile is not None and not profile.range.max_abs <= self.low.row.largest

    def _error(self, n: fx.Node, alone: Alone) -> NodeError:
        ours = tensors_of(self._values[n.name])
        if not ours:
            return NodeError(unsupported=alone.unsupported)
        propagated = tensors_of(self.low.env[n])
        if not is_number(ours[0]):
            return self._discrete_error(n, ours, alone, propagated)
        profile, row = self._profiles[n], self.low.row
        later = self._propagated_error(n, propagated[0])
        if not later < math.inf:
            self._spoilt.add(n)
        if alone.unsupported is not None or not same_shapes(ours, alone.low):
            reason = alone.unsupported or _OTHER_SHAPE
            return NodeError(propagated_error=later, unsupported=reason, cause="unsupported")
        viewing = viewed(n) is not None
        found = profile.rounding(row) if viewing else profile.deviation(entries(tensors_of(alone.low)[0]), row)
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
            known = earlier.propagated_error if earlier is not None else profile.rounding(self.low.row).error
            if known is not None:
                return known
        return profile.error(entries(low))

    def _discrete_error(self, n: fx.Node, ours: Leaves, alone: Alone, propagated: Leaves) -> NodeError:
        if _disagreement(ours, propagated):
            self._spoilt.add(n)
        if alone.unsupported is not None or not same_shapes(ours, alone.low):
            return NodeError(unsupported=alone.unsupported or _OTHER_SHAPE, cause="unsupported")
        share = _disagreement(ours, tensors_of(alone.low))
        return NodeError(disagreement=share, cause="discrete" if share else None)


def _disagreement(ours: Leaves, theirs: Leaves) -> float:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if not is_number(a)]
    return max((disagreement(a, b) if a.shape == b.shape else 1.0 for a, b in pairs), default=0.0)
