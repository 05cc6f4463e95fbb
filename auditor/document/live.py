"""Describes a live model in plan.json, applies a plan from there to a live model, or writes `patched_model.py` for it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..artefact.applying import apply_plan
from ..artefact.base import plan_table
from ..artefact.emit import emit
from ..artefact.libraries import applicable
from ..artefact.runtime import precision_of
from ..artefact.strategies import GRAPHS
from ..errors import PlanError
from ..isolation import isolate
from ..isolation.members import misfit, named_modules, named_parameters, size_of, structure_of
from ..isolation.run_model import run_model
from ..numerics.formats import label, runs
from ..plan.context import emit_plans
from ..records import Audit, Plan, Subject
from ..records.paths import enclosing_paths
from ..verify.artefact import NotHandedOver, Verifier
from .read import audit_in, plan_called, plan_of
from .torchao import quantize, quantized_audit


def apply(model: nn.Module, plan: Any, name: str | None = None) -> nn.Module:
    """Make `model` follow a plan, in place, and return the model.

    plan: an Audit, its `plans` or one of them, a dict as in plan.json, or the path of a plan.json. name: the plan's
    name, by default the recommended plan's. Class, signature, state_dict keys and hooks of the model are unchanged;
    plans of the strategy `cast` change the weights' dtypes. Warns about low-precision modules that the audited call did
    not run. Raises: PlanError if the plan does not fit the model.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"expected an nn.Module, got a {type(model).__name__}", slug="not-a-model")
    if (audit := quantized_audit(plan, name)) is not None:
        check_fit(model, audit)
        return quantize(model, audit, str(name))
    audit, chosen = select(plan, name)
    result = _apply(model, audit, chosen)
    if warning := unmeasured_modules(audit, chosen):
        warnings.warn(warning, stacklevel=2)
    return result


def unmeasured_modules(audit: Audit | None, plan: Plan) -> str:
    """In words, the modules in low precision whose weights the audited call did not use; "" if there are none.

    An audit that was loaded without its measurements does not know them."""
    rows = [row for row in (audit.ledger if audit is not None else ()) if row.kind == "parameter"]
    unused = dict.fromkeys(row.module for row in rows if row.executed is None)
    scopes = plan_table(plan)["scopes"]
    low = [path for path in unused if precision_of(path, scopes) != "fp32"]
    if not low:
        return ""
    more = f" and {len(low) - 3} more" if len(low) > 3 else ""
    names = ", ".join(repr(path) for path in low[:3])
    formats = " or ".join(label(fmt) for fmt in dict.fromkeys(precision_of(path, scopes) for path in low))
    return (
        f"The audited call did not run {names}{more}: under this plan they run in {formats} like the modules around "
        "them, without a measurement. Audit a method that runs them, such as auditor.audit(model.decode, inputs)."
    )


def select(plan: Any, name: str | None) -> tuple[Audit | None, Plan]:
    """Return one plan, from any of the forms that `apply` accepts, and its audit if that is known.

    Raises: PlanError, also for a plan that torch cannot compute, or that is an exported program.
    """
    if isinstance(plan, Mapping) and "scopes" in plan:
        plan = plan_of(plan, "the plan")
    if isinstance(plan, Plan):
        return None, _runnable(plan)
    if isinstance(plan, Mapping) and plan and all(isinstance(each, Plan) for each in plan.values()):
        return None, _runnable(plan_called(plan, name))
    audit = audit_in(plan)
    quantized = (plan.name for plan in audit.quantized_plans)
    return audit, _runnable(plan_called(audit.plans, name or audit.recommended, quantized))


def read_plans(file: Path, name: str | None) -> tuple[Audit, dict[str, Plan], str]:
    """Return the contents of plan.json, its plans that can be applied, and the name of the plan to use.

    Measurements and verification results are dropped, since the model may have changed since the audit. Raises:
    PlanError(slug="missing-plan" | "bad-plan" | "no-such-plan" | "no-arithmetic" | "plan-is-program").
    """
    audit, chosen = quantized_audit(file, name), name or ""
    if audit is None:
        audit, plan = select(file, name)
        chosen = plan.name
    assert audit is not None
    plans = {
        key: replace(plan, verification=None)
        for key, plan in audit.plans.items()
        if runs(plan.format) and plan.strategy not in GRAPHS
    }
    return audit, plans, chosen


def patched_source(subject: Subject, audit: Audit, plans: Mapping[str, Plan], chosen: str, directory: Path) -> str:
    """The text of `patched_model.py` for the model of `subject`, to be saved in `directory`.

    Raises: PlanError(slug="plan-mismatch") if one of the plans does not fit the model.
    """
    for plan in plans.values():
        with isolate(subject.model):  # one plan may round weights that the next needs in FP32
            _apply(subject.model, audit, _runnable(plan))
    parameters = size_of(subject.model)
    quantized = {name: file for name, file in applicable(audit).items() if name == chosen}
    return emit(subject.origin, parameters, plans, chosen, directory, structure_of(subject.model), quantized)


def check_artefact(subject: Subject, audit: Audit, plans: Mapping[str, Plan], chosen: str, seed: int) -> None:
    """Run the patched model once, in a fresh process; if torchao quantizes the model, in this process and without
    emulating a GPU. Raises: LoadError(slug="not-rebuilt"); PlanError(slug="plan-mismatch" | "no-arithmetic")."""
    if chosen not in plans:
        check_fit(subject.model, audit)
        with isolate(subject.model):
            quantize(subject.model, audit, chosen, lambda: run_model(subject.model, subject.batches[0], seed=seed))
        return
    if subject.origin is None:
        return
    with Verifier.start(subject.batches[:1], seed=seed, gradients=False) as (verifier, folder), suppress(NotHandedOver):
        failure = verifier.ask(emit_plans(subject, plans, folder), [chosen])[chosen]
        if isinstance(failure, str):
            raise PlanError(f"the model does not run under the plan {chosen}: {failure}", slug="plan-mismatch")


def _runnable(plan: Plan) -> Plan:
    if plan.strategy in GRAPHS:
        file = plan.program.file if plan.program else f"{plan.strategy}_{plan.format}.pt2"
        raise PlanError(
            f"a plan of strategy {plan.strategy} cannot be applied to a module: the plan is an exported program. "
            f"Call torch.export.load({file[:200]!r}).module() like the model. For another model, audit that model.",
            slug="plan-is-program",
        )
    used = [plan.format, *(choice.precision for choice in plan.scopes.values())]
    lacking = next((fmt for fmt in used if not runs(fmt)), None)
    if lacking is not None:
        raise PlanError(
            f"torch cannot compute in {label(lacking)}, so the plan cannot be run: choose a plan in another format.",
            slug="no-arithmetic",
        )
    return plan


def fields_of(model: nn.Module, owners: Collection[str]) -> dict[str, Any]:
    """The fields of Audit on the model alone, of which `check_fit` compares two. owners: modules with operations."""
    modules = named_modules(model)
    around = {path for owner in owners for path in enclosing_paths(owner)}.difference(owners)
    return {
        "parameters": size_of(model),
        "structure": structure_of(model),
        "tied_parameters": _under_several_names(named_parameters(model)),
        "shared_modules": _under_several_names(modules),
        "classes": {path: type(module).__name__ for path, module in modules if path in around},
    }


def _under_several_names(named: Iterable[tuple[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """All names of each parameter or module that has more than one name. named: pairs (name, parameter or module)."""
    names: dict[int, list[str]] = {}
    for name, item in named:
        names.setdefault(id(item), []).append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)


def check_fit(model: nn.Module, audit: Audit | None) -> None:
    """Check that the audit is of this model. Raises: PlanError(slug="plan-mismatch" | "lazy-weights") if not."""
    try:
        size_of(model)
    except ValueError as error:
        raise PlanError(str(error), slug="lazy-weights") from error
    if audit is None:
        return
    scopes = (path for plan in audit.plans.values() for path in plan.scopes)
    paths = {*scopes, *audit.classes, *(row.module for row in audit.ledger)}
    if misfit_words := misfit(model, audit.parameters, audit.structure, sorted(paths)):
        raise PlanError(f"{misfit_words}.", slug="plan-mismatch")


def _apply(model: nn.Module, audit: Audit | None, plan: Plan) -> nn.Module:
    check_fit(model, audit)
    try:
        return apply_plan(model, plan_table(plan))
    except ValueError as error:
        raise PlanError(f"{error}.", slug="plan-mismatch") from error
