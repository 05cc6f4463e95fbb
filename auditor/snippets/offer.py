"""Selects the plan of an audit for a tool, and writes the comments around its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..artefact.text import comment
from ..document.read import plan_called
from ..errors import PlanError
from ..numerics.formats import FORMATS, label, runs
from ..records import Audit, Plan


@dataclass(frozen=True)
class Tool:
    """A tool that can run plans. strategies: the supported strategies. otherwise: advice for other plans.

    impossible: why a plan of a supported strategy cannot be expressed, or None.
    """

    title: str
    strategies: tuple[str, ...]
    otherwise: str
    render: Callable[[Audit, Plan], str]
    impossible: Callable[[Audit, Plan], str | None] = lambda audit, plan: None


def choose(audit: Audit, strategies: Sequence[str], name: str | None) -> tuple[Plan, str] | None:
    """Choose the plan called `name`, or by default the recommended or another verified plan; return it with a remark.

    Returns None if no suitable plan meets the error budget. Raises: PlanError(slug="no-such-plan" | "no-arithmetic").
    """
    able = {name: plan for name, plan in audit.plans.items() if runs(plan.format)}
    if name is not None:
        plan = plan_called(audit.plans, name)
        if name not in able:
            raise PlanError(f"torch cannot compute in {label(plan.format)}: no code can run {name!r}.", "no-arithmetic")
        return plan, ""
    first = able.get(audit.recommended or "")
    if first is not None and first.strategy in strategies:
        return first, ""
    fitting = [plan for plan in able.values() if plan.strategy in strategies and plan.is_verified]
    if not fitting:
        return None
    if first is None:
        return fitting[0], "No plan of this audit is recommended."
    remark = f"The recommended plan, {first.name!r}, has no equivalent in this tool."
    return min(fitting, key=lambda plan: plan.format != first.format), remark


def code_for(audit: Audit, tool: Tool, name: str | None) -> str:
    """The plan for a tool as code, or comments that say why there is no code."""
    chosen = choose(audit, tool.strategies, name)
    if chosen is None:
        if audit.plans and not any(runs(plan.format) for plan in audit.plans.values()):
            return comment(f"{tool.title}: no plan can be run, since torch cannot compute in the plans' formats.")
        wanted = " or ".join(tool.strategies)
        return comment(f"{tool.title}: no plan of strategy {wanted} meets the error budget.", tool.otherwise)
    plan, remark = chosen
    cannot = f"{tool.title}: cannot express {plan.name!r}"
    if plan.strategy not in tool.strategies:
        return comment(f"{cannot}, a plan of strategy {plan.strategy}.", tool.otherwise)
    if why := tool.impossible(audit, plan):
        return comment(f"{cannot}.", why)
    error = "The plan failed in a run, or was not run: audit the model again before you use the plan."
    if plan.measured_error is not None:
        verdict = "Verified" if plan.is_verified else "NOT within the budget"
        limit = " times a criterion's limit" if audit.criteria else f", budget {audit.max_error:.2g}"
        error = f"{verdict}: the patched model has an error of {plan.measured_error:.2g}{limit}. The code below was generated for {tool.title} and not run."
    return comment(f"{tool.title}: the plan {plan.name!r}. {error}", remark) + tool.render(audit, plan)


def dtype_text(fmt: str) -> str:
    """A format's dtype in code: `torch.float16`."""
    return f"torch.{FORMATS[fmt].storage}"
