"""What one format does to every node, one after the other: its error alone and in a low run, and what attribution needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import first_line
from ..execution.execute import with_literals
from ..numerics.casting import carried_in, lowered
from ..numerics.entries import entries, is_number
from ..numerics.histogram import Profile
from ..numerics.kernels import run_op
from ..numerics.metrics import disagreement, sqnr_db
from ..numerics.nodes import op_of, row_of, target_of, tensors_of, viewed
from ..raised import let_through
from ..records import Capture, NodeError
from .alone import Alone, Leaves, Ran, Trace, same_shapes, trace_of
from .causes import cause_of, deciding, divisors, guarding

_OTHER_SHAPE = "its shape depends on the precision"


class InFormat:
    """Measures node after node in one format, right after the reference has run it; beside that it runs the model low from
    the start.

    values, profiles: reference results and their magnitudes so far. by_inputs: products whose inputs' errors are told apart.
    env: results of the low run. pure: whether all floating ones are low, and come of the run itself.
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
        self.env: dict[fx.Node, Any] = {}
        self.pure = True
        self._values, self._profiles, self._by_inputs = values, profiles, by_inputs
        self._deciding, self._guarding = deciding(capture), guarding(capture)
        self._rounded: dict[fx.Node, Any] = {}
        self._propagated: dict[str, float] = {}
        self._spoilt: set[fx.Node] = set()

    def measure(self, n: fx.Node) -> tuple[NodeError, Trace]:
        """The node alone, and in the run that is low from the start; what cannot be compared has a reason instead."""
        given = tensors_of([self._values.get(source.name) for source in n.all_input_nodes])
        results, error = tensors_of(self._values[n.name]), NodeError()
        if any(leaf.is_quantized for leaf in (*given, *results)):
            reason = f"{op_of(n)} computes with quantised integers"
            error = NodeError(unsupported=reason, cause="unsupported")
        elif not any(leaf.device.type == "meta" for leaf in results):
            try:
                return self._measured(n)
            except Exception as failure:  # an operation of the user's own may give anything
                let_through(failure)
                reason = f"{op_of(n)} cannot be compared with FP32: {first_line(failure)[:160]}"
                error = NodeError(unsupported=reason, cause="unsupported")
        if n not in self.env:
            self.advance(n)
        return error, Trace()

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Nothing will read these any more."""
        for node in nodes:
            self.env.pop(node, None)
            self._rounded.pop(node, None)

    def advance(self, n: fx.Node) -> None:
        """The node in the low run; where it cannot run, the run goes on from the reference."""
        reference = self._values[n.name]
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self.value_of)
        args, kwargs = with_literals(args, kwargs, self.alone.literals(n))
        try:
            result = run_op(target_of(n), args, kwargs)
        except Exception as error:
            let_through(error)
            result = None
        if result is None or not same_shapes(reference, result):
            result = lowered(reference, self.alone.row)
            self.pure = False
        single = any(x.dtype is torch.float32 and carried_in(x) is None for x in tensors_of(result))
        self.pure = self.pure and not single
        self.env[n] = result

    def value_of(self, source: fx.Node) -> Any:
        """What a node gave in the low run; weights and inputs are rounded when first read."""
        if source not in self.env:
            self.env[source] = lowered(self._values[source.name], self.alone.row)
        return self.env[source]

    def _measured(self, n: fx.Node) -> tuple[NodeError, Trace]:
        ran = self.alone.run(n, fx.node.map_arg((n.args, n.kwargs), self._read))
        self.advance(n)
        inherited = any(source in self._spoilt for source in n.all_input_nodes)
        error = self._error(n, ran)
        if ran.unsupported or error.disagreement or _turned(error) or self._turns(n):
            error = replace(error, born=not inherited)
        if error.propagated_error is not None:
            self._propagated[n.name] = error.propagated_error
        vanishes = bool(error.underflow) and n.name in self._guarding
        broken = _turned(error) or self._overflows(n) or bool(error.disagreement) or vanishes
        told = error.unsupported is None
        trace = trace_of(n, self._values[n.name], ran, n.name in self._by_inputs) if told else Trace()
        if row_of(n).recurrent:  # step after step: dear to run, and small beside what its steps hold
            self.alone.kept[n.name] = ran
        return error, replace(trace, broken=broken, near=n.name in self._deciding)

    def _read(self, source: fx.Node) -> Any:
        """A reference value rounded to the format, kept as long as others read it."""
        if source not in self._rounded:
            given = source.op != "call_function"
            self._rounded[source] = self.value_of(source) if given else self.alone.rounded(source)
        return self._rounded[source]

    def _overflows(self, n: fx.Node) -> bool:
        profile = self._profiles.get(n)
        return profile is not None and not profile.range.max_abs <= self.alone.row.largest

    def _error(self, n: fx.Node, ran: Ran) -> NodeError:
        ours = tensors_of(self._values[n.name])
        if not ours:
            return NodeError(unsupported=ran.unsupported)
        propagated = tensors_of(self.env[n])
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
        divides = any(n in divisors(user) for user in n.users)
        return NodeError(
            local_error=found.error,
            propagated_error=later,
            overflow=found.damage.overflow,
            nan=found.damage.nan,
            underflow=found.damage.underflow,
            subnormal=found.damage.subnormal,
            max_ulp=found.max_ulp,
            sqnr_db=sqnr_db(found.error),
            cause=cause_of(op_of(n), found.damage, found.error, row, profile, inputs, divisor, divides),
        )

    def _turns(self, n: fx.Node) -> bool:
        """Whether the run that is low from the start is Inf or NaN here where FP32 is finite: it need not be alone."""
        pairs = zip(tensors_of(self._values[n.name]), tensors_of(self.env[n]), strict=False)
        return n in self._spoilt and any(
            is_number(ours) and bool((entries(ours).isfinite() & ~entries(low).isfinite()).any()) for ours, low in pairs
        )

    def _propagated_error(self, n: fx.Node, low: torch.Tensor) -> float:
        profile, source = self._profiles[n], viewed(n)
        if source is None:
            return profile.error(entries(low))
        if source.op == "call_function":
            return self._propagated[source.name] if source.name in self._propagated else profile.error(entries(low))
        return profile.rounding(self.alone.row).error

    def _discrete_error(self, n: fx.Node, ours: Leaves, ran: Ran, propagated: Leaves) -> NodeError:
        if _disagreement(ours, propagated):
            self._spoilt.add(n)
        if ran.unsupported is not None or not same_shapes(ours, ran.low):
            return NodeError(unsupported=ran.unsupported or _OTHER_SHAPE, cause="unsupported")
        share = _disagreement(ours, tensors_of(ran.low))
        return NodeError(disagreement=share, cause="discrete" if share else None)


def _turned(error: NodeError) -> bool:
    """Whether finite entries became Inf or NaN."""
    return bool(error.overflow or error.nan)


def _disagreement(ours: Leaves, theirs: Leaves) -> float:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if not is_number(a)]
    return max((disagreement(a, b) if a.shape == b.shape else 1.0 for a, b in pairs), default=0.0)
