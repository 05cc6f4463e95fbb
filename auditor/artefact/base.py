"""What a strategy is: everything that planning, replaying, patching and reporting ask of one way to run a model low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..records import Literals, Node, Plan, ScopeChoice
from .runtime import Runtime, device_type


class Strategy:
    """One way to run a model low. A subclass says what differs; `auditor.artefact.strategies.register` makes its object known.

    A plan gives every scope a precision; the strategy says what that means. name: an identifier, the first part of its
    plans' names. title: what a report puts behind a format, "under autocast". purpose: what it is for, a few words.
    rank: of plans that are as good, those of the lowest rank are recommended. runtime: what it does to a live module;
    its class is copied into `patched_model.py` as it stands, with those it builds on, so it uses torch and
    `auditor.artefact.runtime` alone.
    """

    name: str
    title: str
    purpose: str
    runtime: type[Runtime]
    rank = 2
    trains = False
    """Whether its plans are for training too: weights and gradients stay FP32."""
    regional = False
    """Whether low scopes run under `torch.autocast`, which sets anew what the author set around them."""
    per_operation = False
    """Whether its plans give operations of an exported graph their precision, and are files of their own."""
    stores: frozenset[str] = frozenset()
    """Kinds of the graph's placeholders stored in the precision of the scopes that hold them; "input": in the root's."""
    raises_weights = False
    """Whether a module raises what it has stored low to FP32 before it computes with it."""
    seconds_per_byte = 0.0
    """What a byte of stored weights counts for in the solver, besides the time of a forward."""

    def computes_in(self, precision: str) -> str:
        """Precision that the operations of a scope run in."""
        return precision

    def boundary(self, precision: str, above: str | None, keeps: bool) -> tuple[str | None, str | None]:
        """What a wrapped scope converts its inputs to, and its result; None leaves them as they are.

        above: precision around the scope, "input" where that differs from call to call, None for the root. keeps: nothing
        low reads the result of an FP32 scope. As its runtime does.
        """
        return None, None

    def literals(self, node: Node) -> Mapping[str, Literals]:
        """{format: what Python writes at a node where it derives it from the dtypes that it sees in a model run so}."""
        return {}

    def gains(self, plan: Plan) -> bool:
        """Whether a plan is worth more than FP32 to whoever chose this strategy: products run low, or fewer bytes move."""
        return plan.low_precision_flops > 0 or plan.predicted_speedup > 1


def autocast_type(module: nn.Module, inputs: Any) -> str:
    """The device type of regions around a whole model: its GPU's, or CUDA's where a CPU emulates one."""
    kind = device_type(module, inputs)
    return "cuda" if kind == "cpu" else kind


def plan_table(plan: Plan) -> dict[str, Any]:
    """What applying a Plan record takes, as plan.json and `patched_model.py` hold it."""
    scopes = {path: _scope(choice) for path, choice in plan.scopes.items()}
    stored = {"raised": plan.raised, "stored_low": dict(plan.stored_low)}
    return {"strategy": plan.strategy, "format": plan.format, **stored, "scopes": scopes}


def _scope(choice: ScopeChoice) -> dict[str, Any]:
    kept = {"keep": list(choice.keep)} if choice.keep else {}
    return {"precision": choice.precision, "output": choice.output, **kept}
