"""Every node in a run of the graph under a plan: its dtypes, and the error that is left once modules are protected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ..errors import MeasureError
from ..numerics.metrics import relative_l2
from ..numerics.nodes import tensors_of
from ..raised import let_through
from ..records import Batch, Capture, Dtypes, ModelPath, Plan
from .chosen import scoped
from .dtypes import dtypes_of
from .execute import Executor, Under, low_literals
from .running import AS_WRITTEN, FULL, Running
from .strategies import running


@dataclass(frozen=True)
class UnderPlan:
    """What a run under a plan was like, by node. errors: relative L2 of floating outputs, in execution order."""

    errors: Mapping[str, float] = field(default_factory=dict)
    dtypes: Mapping[str, Dtypes] = field(default_factory=dict)


NONE: Mapping[str, UnderPlan] = {}


def under_plan(
    capture: Capture, model: nn.Module, batch: Batch, plan: Plan | None, low: Mapping[str, UnderPlan] = NONE
) -> UnderPlan:
    """Error and dtypes of each node under the plan, on one batch; where batches take several paths, on the first of each.

    low: by format a run on it that was low from the start, which is the plan's where that has everything low.

    Both runs advance node by node, so that no more than two sets of live values are held. A node whose shape depends
    on values may differ in it, and has no error. Empty where an operation raises, as one that refuses the format, or there
    is no plan, or one that is a program of its own.
    """
    if plan is None or plan.program is not None:
        return UnderPlan()
    how = running(capture, plan.strategy, scoped(plan.scopes), plan.format)
    if plan.format in low and _all_low(capture, how, plan.format):
        return low[plan.format]
    errors, dtypes = dict[str, float](), dict[str, Dtypes]()
    for path in capture.paths or (ModelPath(capture, (batch,)),):
        try:
            with torch.no_grad():
                off, given = _compared(path.capture, how, path.capture.bind(model, path.batches[0]))
        except Exception as error:
            let_through(error)
            return UnderPlan()
        errors, dtypes = {**off, **errors}, {**given, **dtypes}
    return UnderPlan(errors, dtypes)


def _all_low(capture: Capture, how: Running, format: str) -> bool:
    """Whether a run lowers all that it reads at once, computes everything in what it reads, and writes the format's literals."""
    low = (format,)
    for n in capture.graph_module.graph.nodes:
        given = [x for x in tensors_of(n.meta.get("val")) if x.is_floating_point()] if n.op == "placeholder" else []
        if given and how.placeholder_precision.get(n.name) != format:
            return False
        if any(how.crossing(source.name, n.name) not in ((), low) for source in n.all_input_nodes):
            return False
        if n.op == "call_function":
            casts = how.casts(node := capture.nodes[n.name])
            literals = low_literals(node, format) or AS_WRITTEN
            if (casts.autocast, casts.literals) != ("none", literals) or literals.result is not None:
                return False
    return True


def _compared(capture: Capture, how: Running, inputs: Sequence[Any]) -> tuple[dict[str, float], dict[str, Dtypes]]:
    """Errors and dtypes of one run under a policy, the FP32 run beside it."""
    errors, dtypes = dict[str, float](), dict[str, Dtypes]()

    def told(n: fx.Node, arrived: Any, handed: Any, result: Any) -> None:
        if (found := dtypes_of(arrived, handed, result)) is not None:
            dtypes[n.name] = found

    low, reference = (
        Executor(capture.graph_module, policy) for policy in (Under(capture, how, told), Under(capture, FULL))
    )
    for (n, result), (_, expected) in zip(low.steps(*inputs), reference.steps(*inputs), strict=True):
        if n.op == "call_function" and _comparable(expected, result):
            with suppress(MeasureError):  # another shape: there is no error to speak of
                errors[n.name] = relative_l2(expected, result)
    return errors, dtypes


def _comparable(expected: Any, result: Any) -> bool:
    both = isinstance(expected, torch.Tensor) and isinstance(result, torch.Tensor)
    return both and expected.is_floating_point() and result.is_floating_point()
