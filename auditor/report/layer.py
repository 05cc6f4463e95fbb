"""One module or operation in words: what each plan runs it in, and why not lower."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import AuditorError
from ..paths import within
from .kept import own, precision_of
from .words import label

SHOWN = 12
"""Lines about what lies in one module, a plan."""


def explain_layer(plans: Mapping[str, Any], recommended: str | None, owners: Mapping[str, str], name: str) -> str:
    """A paragraph a plan, the recommended one first.

    plans: as an Audit has them, or as read from plan.json. owners: {operation: its module}, as far as they are known.
    Raises: AuditorError(slug="no-such-layer").
    """
    modules = _modules(plans, owners)
    if name not in modules and name not in owners:
        close = difflib.get_close_matches(name, [*modules, *owners], n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "module paths and names of operations are in plan.json"
        raise AuditorError(f"the model has no module or operation {name!r}: {hint}", slug="no-such-layer")
    chosen = sorted(plans.items(), key=lambda item: item[0] != recommended)
    text = [f"{name or own(name)}"]
    for title, plan in chosen:
        mark = " (recommended)" if title == recommended else ""
        lines = list(_operation(plan, owners[name], name) if name not in modules else _module(plan, owners, name))
        text += [f"  {title}{mark}: {lines[0]}", *(f"    {line}" for line in lines[1:])]
    return "\n".join(text) + "\n"


def _modules(plans: Mapping[str, Any], owners: Mapping[str, str]) -> set[str]:
    """Every module that is known of, those that only hold others too."""
    listed = {path for plan in plans.values() for reason in plan.reasons for path in reason.modules}
    listed |= {path for plan in plans.values() for path in plan.scopes} | set(owners.values())
    return {".".join(path.split(".")[: depth + 1]) for path in listed for depth in range(path.count(".") + 1)} | {""}


def _kept(plan: Any) -> Iterable[Any]:
    """Operations of a plan that is a program of its own, those that stay FP32 and are known in the captured graph."""
    program = getattr(plan, "program", None)
    return () if program is None else (kept for kept in program.kept or () if kept.node)


def _operation(plan: Any, owner: str, name: str) -> Iterator[str]:
    own_choice = next((kept for kept in _kept(plan) if kept.node == name), None)
    if own_choice is not None:
        yield f"FP32: {own_choice.because}"
        return
    reason = next((reason for reason in plan.reasons if name in reason.operations), None)
    if reason is not None:
        yield f"not low: {reason.words}"
    elif precision_of(owner, plan) == "fp32":
        yield f"FP32 with {own(owner)}: {_words(plan, owner)}"
    else:
        yield f"{label(plan.format)}, as {own(owner)}"


def _module(plan: Any, owners: Mapping[str, str], name: str) -> Iterator[str]:
    if precision_of(name, plan) == "fp32":
        yield f"FP32: {_words(plan, name)}"
    else:
        yield label(plan.format)
    inside = sorted(_inside(plan, owners, name))
    yield from inside[:SHOWN]
    if len(inside) > SHOWN:
        yield f"and {len(inside) - SHOWN} more, in plan.json"


def _words(plan: Any, path: str) -> str:
    found = next((reason.words for reason in plan.reasons if path in reason.modules), None)
    return found or ("it has no operations of its own" if plan.reasons else "this file holds no reasons")


def _inside(plan: Any, owners: Mapping[str, str], name: str) -> Iterable[str]:
    """What lies in a module and is not low, with why; of the root, what is its own."""
    for kept in _kept(plan):
        owner = owners.get(kept.node)
        if owner is not None and (owner == name or (name and within(owner, name))):
            yield f"{kept.node} FP32: {kept.because}"
    for reason in plan.reasons:
        for path in reason.modules:
            if name and path != name and within(path, name):
                yield f"{path} FP32: {reason.words}"
        for operation in reason.operations:
            owner = owners.get(operation)
            if owner == name and reason.kind != "not-floating":
                yield f"{operation} not low: {reason.words}"
