"""Error of every node in a run of the graph under a plan: what is left of the formats' own once modules are protected."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ..errors import MeasureError
from ..formats.metrics import relative_l2
from ..raised import let_through
from ..records import Batch, Capture, Plan
from .execute import PolicyInterpreter
from .running import FULL, Running
from .strategies import running, scoped


def plan_errors(capture: Capture, model: nn.Module, batch: Batch, plan: Plan | None) -> dict[str, float]:
    """Relative L2 error of each floating node's output under the plan, on one batch, in execution order.

    Both runs advance node by node, so that no more than two sets of live values are held. A node whose shape depends
    on values may differ in it, and is left out. {} where an operation raises, as one that refuses the format, or there is no plan.
    """
    if plan is None:
        return {}
    how = running(capture, plan.strategy, scoped(plan.scopes), plan.format)
    low = _Beside(capture, how)
    try:
        with torch.no_grad():
            low.run(*capture.bind(model, batch))
    except Exception as error:
        let_through(error)
        return {}
    return low.errors


class _Beside(PolicyInterpreter):
    """A run under a policy with the FP32 run beside it, compared at every node."""

    def __init__(self, capture: Capture, how: Running) -> None:
        super().__init__(capture, how)
        self.reference = PolicyInterpreter(capture, FULL)
        self.errors: dict[str, float] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.reference.args_iter = iter(args)
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        expected = self.reference.env[n] = self.reference.run_node(n)
        if n.op == "call_function" and _comparable(expected, result):
            self._compare(n.name, expected, result)
        for used_up in self.user_to_last_uses.get(n, ()):
            del self.reference.env[used_up]
        return result

    def _compare(self, name: str, expected: torch.Tensor, result: torch.Tensor) -> None:
        try:
            self.errors[name] = relative_l2(expected, result)
        except MeasureError:  # another shape: there is no error to speak of
            return


def _comparable(expected: Any, result: Any) -> bool:
    both = isinstance(expected, torch.Tensor) and isinstance(result, torch.Tensor)
    return both and expected.is_floating_point() and result.is_floating_point()
