"""Applying a plan, in whichever form it comes, to a model in hand."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn

from ..errors import PlanError
from ..formats.table import label, runs
from ..patch.runtime import apply_plan
from ..patch.table import plan_table
from ..records import Plan
from .read import load_plan, read_document, read_plan


def apply(model: nn.Module, plan: Any, name: str | None = None) -> nn.Module:
    """Make `model` follow a plan, in place, and return it.

    plan: an Audit, its `plans`, a dict as in plan.json, or a path to one. name: which of its plans; the recommended one
    if left out. The class, signature, state_dict keys and hooks of the model stay; `cast` plans change weight dtypes.
    Raises: PlanError where the plan does not fit the model.
    """
    chosen = select(plan, name)
    _check_parameters(model, chosen)
    try:
        return apply_plan(model, chosen)
    except ValueError as error:
        raise PlanError(f"{error}.", slug="plan-mismatch") from error


def select(plan: Any, name: str | None) -> dict[str, Any]:
    """One plan as a dict with `strategy`, `format` and `scopes`, from any of the forms that `apply` takes.

    Raises: PlanError, also for a plan in a format that torch does not compute in.
    """
    chosen = _selected(plan, name)
    if not runs(chosen["format"]):
        raise PlanError(
            f"torch has no arithmetic in {label(chosen['format'])}, so the plan cannot be run: choose one in another "
            "format.",
            slug="no-arithmetic",
        )
    return chosen


def _selected(plan: Any, name: str | None) -> dict[str, Any]:
    if isinstance(plan, (str, PathLike)):
        plan = load_plan(plan)
    if hasattr(plan, "plans"):
        plan, name = plan.plans, name or plan.recommended
    if isinstance(plan, Plan):
        return plan_table(plan)
    if isinstance(plan, Mapping) and "plans" in plan:
        subject = read_document(plan, "the plan").subject
        expected = {"parameters": subject.parameters if subject else None}
        return {**expected, **_pick(plan["plans"], name or plan.get("recommended"))}
    if isinstance(plan, Mapping) and "scopes" in plan:
        read_plan(plan, "the plan")
        return dict(plan)
    if isinstance(plan, Mapping) and plan:
        return _pick(plan, name)
    raise PlanError("A plan is an Audit, its plans, a dict as in plan.json, or a path to one.", slug="bad-plan")


def _pick(plans: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    if name is None or name not in plans:
        wanted = f"{name!r} is not among the plans" if name else "no plan is recommended"
        raise PlanError(f"{wanted}; choose one of {', '.join(sorted(plans))}.", slug="no-such-plan")
    found = plans[name]
    if isinstance(found, Plan):
        return plan_table(found)
    read_plan(found, f"the plan {name!r}")
    return dict(found)


def _check_parameters(model: nn.Module, plan: Mapping[str, Any]) -> None:
    expected = plan.get("parameters")
    found = sum(parameter.numel() for parameter in model.parameters())
    if expected is not None and expected != found:
        raise PlanError(
            f"the plan was made for a model of {expected} parameters, this one has {found}: audit it again.",
            slug="plan-mismatch",
        )
