"""Which plan of an audit a tool is given, what every tool asks of it, and how its code is written."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from ..document.read import applicable, read_json
from ..errors import PlanError
from ..folder import path_of
from ..numerics.formats import FORMATS, label, runs
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
        return applicable(read_json(path_of(plan, "a plan.json or its directory")), str(plan))
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


WIDTH = 100


@dataclass(frozen=True)
class Tool:
    """strategies: those the tool can follow. otherwise: what to do with a plan of another one, in a sentence.

    impossible: why a plan cannot be expressed although its strategy fits, or None.
    """

    title: str
    strategies: tuple[str, ...]
    otherwise: str
    render: Callable[[Chosen], str]
    impossible: Callable[[Chosen], str | None] = lambda chosen: None


def dtype_text(fmt: str) -> str:
    """How code names the dtype of a format: `torch.float16`."""
    return f"torch.{FORMATS[fmt].storage}"


def comment(*paragraphs: str) -> str:
    """Paragraphs as comment lines. No line break of a paragraph survives to end the comment early."""
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    printable = ("".join(c if c.isprintable() else " " for c in paragraph) for paragraph in paragraphs if paragraph)
    lines = [line for paragraph in printable for line in wrapper.wrap(paragraph)]
    return "\n".join(lines) + "\n"


def heading(title: str, chosen: Chosen) -> str:
    """What the snippet is, and how far its plan has been shown to hold."""
    return comment(f"{title}: the plan {chosen.plan.name!r}. {_evidence(chosen)}", chosen.remark)


def _evidence(chosen: Chosen) -> str:
    plan = chosen.plan
    if plan.measured_error is None:
        return "It failed when it was run, or was not run: audit the model again before you use it."
    held = "Verified" if plan.verified else "NOT within the budget"
    error = f"measured error {plan.measured_error:.2g} for a budget of {chosen.audit.max_error:.2g}"
    return f"{held}: {error}, on the patched model itself. This tool was not run."


def listing(name: str, items: Iterable[str]) -> str:
    """A list literal, one item a line; the items are Python already."""
    lines = "".join(f"    {item},\n" for item in items)
    return f"{name} = [\n{lines}]\n" if lines else f"{name} = []\n"


def mapping(name: str, items: Mapping[str, str]) -> str:
    """A dict literal from names to Python expressions."""
    return f"{name} = {{\n" + "".join(f"    {key!r}: {value},\n" for key, value in items.items()) + "}\n"
