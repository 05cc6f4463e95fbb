"""Which plan of an audit a tool is given, and what every tool asks of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from ..document.read import applicable, loaded
from ..errors import PlanError
from ..folder import path_of
from ..numerics.formats import label, runs
from ..paths import nearest
from ..records import Audit, Plan


@dataclass(frozen=True)
class Chosen:
    """A plan and the audit it is of. remark: why it is this plan and not the recommended one."""

    plan: Plan
    audit: Audit
    remark: str = ""

    @property
    def init_scale(self) -> float | None:
        """Loss scale that an audit of training recommends; None where there was none."""
        training = self.audit.training
        return training.fp16.init if training and training.fp16 else None

    @property
    def exceptions(self) -> str | None:
        """What a tool that knows modules alone cannot be told; None where there is nothing of the kind."""
        kept = {path: choice.keep for path, choice in self.plan.scopes.items() if choice.keep}
        if not kept:
            return None
        named = "; ".join(f"{', '.join(names)} in {path or 'the root'}" for path, names in kept.items())
        return f"It keeps functions of low modules in FP32, which are no modules: {named}. Use patched_model.py for it."

    def scope_of(self, path: str) -> str:
        """The listed path that a module belongs to: its own, or the nearest above it."""
        return nearest(path, self.plan.scopes) or ""

    def precision(self, path: str) -> str:
        """Precision of a module path."""
        return self.plan.scopes[self.scope_of(path)].precision

    def handed_on(self, path: str) -> str | None:
        """Precision in which a scope hands on its output; None leaves it as it is."""
        if not path or self.plan.scopes[path].output == "keep":
            return None
        return self.precision(path.rpartition(".")[0])

    def deepest_first(self) -> Iterator[str]:
        """Every scope, what lies inside others before them, and the root last."""
        yield from sorted(self.plan.scopes, key=lambda path: (-path.count(".") - bool(path), path))


def audit_in(plan: Any) -> Audit:
    """The audit in any of the forms that hold one. Raises: PlanError."""
    if isinstance(plan, Audit):
        return plan
    if isinstance(plan, str | PathLike):
        return applicable(loaded(path_of(plan, "a plan.json or its directory")), str(plan))
    if isinstance(plan, Mapping):
        return applicable(plan, "the plan")
    raise PlanError("A snippet is made from an Audit, a dict as in plan.json, or a path to one.", slug="bad-plan")


def running(audit: Audit) -> dict[str, Plan]:
    """The plans whose format torch computes in."""
    return {name: plan for name, plan in audit.plans.items() if runs(plan.format)}


def choose(audit: Audit, strategies: Sequence[str], name: str | None) -> Chosen | None:
    """The plan called `name`; else the recommended one, or one of these strategies that stands in for it.

    None where none of these strategies holds the budget. Raises: PlanError(slug="no-such-plan" | "no-arithmetic").
    """
    able = running(audit)
    if name is not None:
        if not isinstance(name, str) or name not in audit.plans:
            known = ", ".join(sorted(able or audit.plans))
            raise PlanError(f"{name!r} is not among the plans; choose one of {known}.", slug="no-such-plan")
        if name not in able:
            raise PlanError(
                f"torch has no arithmetic in {label(audit.plans[name].format)}: there is no code that runs {name!r}.",
                slug="no-arithmetic",
            )
        return Chosen(able[name], audit)
    first = able.get(audit.recommended or "")
    if first is not None and first.strategy in strategies:
        return Chosen(first, audit)
    fitting = [plan for plan in able.values() if plan.strategy in strategies and plan.verified]
    if not fitting:
        return None
    found = Chosen(min(fitting, key=lambda plan: first is not None and plan.format != first.format), audit)
    if first is None:
        return replace(found, remark="No plan of this audit is recommended.")
    return replace(found, remark=f"The recommended plan, {first.name!r}, is one of strategy {first.strategy}.")
