"""The plans of an audit or of a plan.json, and which of them a tool is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from ..document.read import load_plan, read_document
from ..errors import PlanError
from ..numerics.formats import label, runs
from ..paths import nearest
from ..records.audit import Groups


@dataclass(frozen=True)
class Chosen:
    """One plan. scopes: {module path: (precision, what its output is: "keep" or "cast")}. keep: {module path:
    functions that stay FP32 in it, though it is low}. tied, shared: state-dict
    names of one parameter, paths of one module. init_scale: loss scale that an audit of training recommends, None where
    there was none. remark: why it is this plan and not the recommended one.
    """

    name: str
    strategy: str
    format: str
    scopes: Mapping[str, tuple[str, str]]
    keep: Mapping[str, tuple[str, ...]]
    measured_error: float | None
    max_error: float | None
    verified: bool
    tied: Groups
    shared: Groups
    init_scale: float | None = None
    remark: str = ""

    def scope_of(self, path: str) -> str | None:
        """The listed path that a module belongs to: its own, or the nearest above it; None where there is none."""
        return nearest(path, self.scopes)

    def precision(self, path: str) -> str:
        """Precision of a module path."""
        scope = self.scope_of(path)
        return "fp32" if scope is None else self.scopes[scope][0]

    @property
    def exceptions(self) -> str | None:
        """What a tool that knows modules alone cannot be told; None where there is nothing of the kind."""
        if not self.keep:
            return None
        named = "; ".join(f"{', '.join(names)} in {path or 'the root'}" for path, names in self.keep.items())
        return f"It keeps functions of low modules in FP32, which are no modules: {named}. Use patched_model.py for it."

    def handed_on(self, path: str) -> str | None:
        """Precision in which a scope hands on its output; None leaves it as it is."""
        if not path or self.scopes[path][1] == "keep":
            return None
        return self.precision(path.rpartition(".")[0])

    def deepest_first(self) -> Iterator[tuple[str, str]]:
        """(path, precision) of every scope, what lies inside others before them, and the root last."""
        for path in sorted(self.scopes, key=lambda path: (-path.count(".") - bool(path), path)):
            yield path, self.scopes[path][0]


@dataclass(frozen=True)
class Offer:
    """Every plan there is, and the name of the recommended one."""

    plans: Mapping[str, Chosen]
    recommended: str | None

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the plans whose format torch computes in."""
        return tuple(name for name, plan in self.plans.items() if runs(plan.format))

    def choose(self, strategies: Sequence[str], name: str | None) -> Chosen | None:
        """The plan called `name`; else the recommended one, or one of these strategies that stands in for it.

        None where none of these strategies holds the budget. Raises: PlanError(slug="no-such-plan" | "no-arithmetic").
        """
        if name is not None:
            if not isinstance(name, str) or name not in self.plans:
                known = ", ".join(sorted(self.running) or sorted(self.plans))
                raise PlanError(f"{name!r} is not among the plans; choose one of {known}.", slug="no-such-plan")
            if not runs(self.plans[name].format):
                raise PlanError(
                    f"torch has no arithmetic in {label(self.plans[name].format)}: there is no code that runs {name!r}.",
                    slug="no-arithmetic",
                )
            return self.plans[name]
        able = {key: self.plans[key] for key in self.running}
        first = able.get(self.recommended or "")
        if first is not None and first.strategy in strategies:
            return first
        fitting = [plan for plan in able.values() if plan.strategy in strategies and plan.verified]
        if not fitting:
            return None
        found = min(fitting, key=lambda plan: first is not None and plan.format != first.format)
        if first is None:
            return replace(found, remark="No plan of this audit is recommended.")
        return replace(found, remark=f"The recommended plan, {first.name!r}, is one of strategy {first.strategy}.")


def offer_of(plan: Any) -> Offer:
    """The plans in any of the forms that hold several. Raises: PlanError."""
    if isinstance(plan, str | PathLike):
        plan = load_plan(plan)
    if isinstance(plan, Mapping):
        return _from_document(read_document(plan, "the plan"))
    if hasattr(plan, "plans") and hasattr(plan, "subject"):
        return _from_audit(plan)
    raise PlanError("A snippet is made from an Audit, a dict as in plan.json, or a path to one.", slug="bad-plan")


def _from_audit(audit: Any) -> Offer:
    tied, shared = audit.tied_parameters, audit.shared_modules
    window = getattr(getattr(audit, "training", None), "fp16", None)
    init_scale = window.init if window is not None else None
    plans = {
        name: Chosen(
            name,
            plan.strategy,
            plan.format,
            {path: (choice.precision, choice.output) for path, choice in plan.scopes.items()},
            {path: tuple(choice.keep) for path, choice in plan.scopes.items() if choice.keep},
            plan.measured_error,
            audit.max_error,
            plan.verified,
            tied,
            shared,
            init_scale,
        )
        for name, plan in audit.plans.items()
    }
    return Offer(plans, audit.recommended)


def _from_document(found: Any) -> Offer:
    subject, training = found.subject, found.training
    tied, shared = (subject.tied_parameters, subject.shared_modules) if subject else (None, None)
    plans = {
        name: Chosen(
            name,
            plan.strategy,
            plan.format,
            {path: (choice.precision, choice.output) for path, choice in plan.scopes.items()},
            {path: tuple(choice.keep) for path, choice in plan.scopes.items() if choice.keep},
            plan.measured_error,
            found.budget.max_error if found.budget else None,
            plan.verified,
            _groups(tied),
            _groups(shared),
            training.fp16.init_scale if training and training.fp16 else None,
        )
        for name, plan in found.plans.items()
    }
    return Offer(plans, found.recommended)


def _groups(groups: Sequence[Sequence[str]] | None) -> Groups:
    """Groups of names; none in a document that is cut down to its plans."""
    return tuple(tuple(group) for group in groups or () if group)
