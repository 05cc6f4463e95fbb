"""The interface of a strategy, for planning, replay, patching and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..numerics.devices import target_type
from ..records import Literals, Node, Plan
from .runtime import Runtime, device_type


class Strategy:
    """One way to run a model in low precision. Subclasses override its members.

    A plan gives every scope a precision; the strategy decides which tensors it converts. name: an identifier, the first
    part of its plans' names. title: follows a format in reports, such as "under autocast". rank: the lowest wins
    among equally good plans. runtime: the class that patches a live module; its source and its bases' are copied into
    `patched_model.py`, so they may use only torch and `auditor.artefact.runtime`.
    """

    name: str
    title: str
    runtime: type[Runtime]
    rank = 2
    trains = False
    """Whether the strategy's plans can be used for training: weights and gradients are in FP32."""
    regional = False
    """Whether low-precision scopes run in autocast regions, which override the user's regions around the scopes."""
    stores: frozenset[str] = frozenset()
    """Kinds of placeholders stored in their scope's precision; inputs ("input") have the root's precision."""

    def computes_in(self, precision: str) -> str:
        """Precision in which the operations of a scope with this precision run."""
        return precision

    def boundary(self, precision: str, above: str | None, keeps: bool) -> tuple[str | None, str | None]:
        """Precisions to which a wrapped scope's inputs and its result are converted; None: no conversion.

        above: precision around the scope; "input" if it differs between calls, None for the root. keeps: whether no
        low-precision operation reads the result of an FP32 scope. The runtime must make the same conversions.
        """
        return None, None

    def literals(self, node: Node) -> Mapping[str, Literals]:
        """{format: constants that Python derives from a dtype at this node, if the model runs in the format}."""
        return {}

    def gains(self, plan: Plan) -> bool:
        """Whether a plan improves on FP32: some FLOPs are in low precision, or the predicted speedup exceeds 1."""
        return plan.low_precision_flops > 0 or plan.predicted_speedup > 1


def autocast_type(module: nn.Module, inputs: Any) -> str:
    """Device type for autocast around a whole model; on a CPU the audit's target, "cuda" if the CPU emulates a GPU."""
    kind = device_type(module, inputs)
    return target_type() if kind == "cpu" else kind


def plan_table(plan: Plan) -> dict[str, Any]:
    """The plan as a dict, in the form that plan.json and `patched_model.py` contain, without defaults."""
    upcast = {} if plan.upcast == "none" else {"upcast": plan.upcast, "stored_low": dict(plan.stored_low)}
    scopes: dict[str, dict[str, Any]] = {}
    for path, choice in plan.scopes.items():
        kept = {key: list(names) for key in ("keep", "fp32_output") if (names := getattr(choice, key))}
        output = {} if choice.output == "cast" else {"output": choice.output}
        scopes[path] = {"precision": choice.precision, **kept, **output}
    return {"strategy": plan.strategy, "format": plan.format, **upcast, "scopes": scopes}
