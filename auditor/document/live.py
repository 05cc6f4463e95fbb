"""Applying a plan, in whichever form it comes, to a model in hand."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from ..artefact.applying import apply_plan
from ..artefact.base import plan_table
from ..artefact.strategies import GRAPHS
from ..errors import PlanError
from ..isolation.members import size_of, structure_of, unwrapped
from ..numerics.formats import label, runs
from ..records import Plan
from .read import loaded, read_document, read_plan


def apply(model: nn.Module, plan: Any, name: str | None = None) -> nn.Module:
    """Make `model` follow a plan, in place, and return it.

    plan: an Audit, its `plans`, a dict as in plan.json, or a path to one. name: which of its plans; the recommended one
    if left out. The class, signature, state_dict keys and hooks of the model stay; `cast` plans change weight dtypes.
    Raises: PlanError where the plan does not fit the model.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"expected an nn.Module, got a {type(model).__name__}", slug="not-a-model")
    chosen = select(plan, name)
    _check_model(model, chosen)
    try:
        return apply_plan(model, chosen)
    except ValueError as error:
        raise PlanError(f"{error}.", slug="plan-mismatch") from error


def select(plan: Any, name: str | None) -> dict[str, Any]:
    """One plan as a dict with `strategy`, `format` and `scopes`, from any of the forms that `apply` takes.

    Raises: PlanError, also for a plan in a format that torch does not compute in, or that is a program of its own.
    """
    return _runnable(_selected(plan, name))


def pick(plans: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """The plan of this name, as `select` gives it. Raises: PlanError, where there is none or torch cannot run it."""
    return _runnable(_pick(plans, name))


def _runnable(plan: dict[str, Any]) -> dict[str, Any]:
    if plan["strategy"] in GRAPHS:
        file = (plan.get("program") or {}).get("file") or f"{plan['strategy']}_{plan['format']}.pt2"
        raise PlanError(
            f"a plan of strategy {plan['strategy']} changes no module, it is a program of its own: "
            f"torch.export.load({file!r}).module() is called as the model is. Audit another model to have one for it.",
            slug="plan-is-program",
        )
    used = [plan["format"], *(scope["precision"] for scope in plan["scopes"].values())]
    lacking = next((fmt for fmt in used if not runs(fmt)), None)
    if lacking is not None:
        raise PlanError(
            f"torch has no arithmetic in {label(lacking)}, so the plan cannot be run: choose one in another format.",
            slug="no-arithmetic",
        )
    return plan


def _selected(plan: Any, name: str | None) -> dict[str, Any]:
    if isinstance(plan, (str, PathLike)):
        return _of_document(loaded(Path(plan)), str(plan), name)
    if hasattr(plan, "plans"):
        return {**_expected(plan), **_pick(plan.plans, name or plan.recommended)}
    if isinstance(plan, Plan):
        return plan_table(plan)
    if isinstance(plan, Mapping) and "plans" in plan:
        return _of_document(plan, "the plan", name)
    if isinstance(plan, Mapping) and "scopes" in plan:
        read_plan(plan, "the plan")
        return dict(plan)
    if isinstance(plan, Mapping) and plan:
        return _pick(plan, name)
    raise PlanError("A plan is an Audit, its plans, a dict as in plan.json, or a path to one.", slug="bad-plan")


def _of_document(document: Any, where: str, name: str | None) -> dict[str, Any]:
    subject = read_document(document, where).subject
    return {**_expected(subject), **_pick(document["plans"], name or document.get("recommended"))}


def _expected(audited: Any) -> dict[str, Any]:
    """What an Audit, or the subject of a plan.json, says of the model that its plans are for."""
    return {key: value for key in ("parameters", "structure") if (value := getattr(audited, key, None))}


def _pick(plans: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    if not isinstance(name, str) or name not in plans:
        raise _not_there(plans, name)
    found = plans[name]
    if isinstance(found, Plan):
        return plan_table(found)
    read_plan(found, f"the plan {name!r}")
    return dict(found)


def _not_there(plans: Mapping[str, Any], name: str | None) -> PlanError:
    """Names the plans that can be run, since a user chooses among those."""
    wanted = f"{name!r} is not among the plans" if name else "no plan is recommended"
    formats = {
        key: plan.format if isinstance(plan, Plan) else read_plan(plan, key).format for key, plan in plans.items()
    }
    if running := sorted(key for key, fmt in formats.items() if runs(fmt)):
        return PlanError(f"{wanted}; choose one of {', '.join(running)}.", slug="no-such-plan")
    lacking = " and ".join(dict.fromkeys(map(label, formats.values())))
    return PlanError(
        f"{wanted}, and none can be run: torch has no arithmetic in {lacking}. Audit a format that it computes in.",
        slug="no-arithmetic",
    )


def _check_model(model: nn.Module, plan: Mapping[str, Any]) -> None:
    expected, structure = plan.get("parameters"), plan.get("structure")
    try:
        found = size_of(model)
    except ValueError as error:
        raise PlanError(str(error), slug="lazy-weights") from error
    if structure == structure_of(model) if structure else expected in (None, found):
        return
    if expected not in (None, found):
        raise PlanError(
            f"the plan was made for a model of {expected} parameters, this one has {found}: audit it again.",
            slug="plan-mismatch",
        )
    raise PlanError(
        f"the plan was made for another model than this {type(unwrapped(model)).__name__}: modules or parameters have "
        "other names, classes or shapes. Audit this model.",
        slug="plan-mismatch",
    )
