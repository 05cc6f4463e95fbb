"""The modules that a plan keeps in FP32, those alike as one line with one clause of why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..paths import nearest, pattern
from ..plan.clauses import apart, gained
from ..records import Kept, Plan, Program, Reason
from .words import braced, count, each

_CODE = re.compile(r"[A-Z]{3}\d{3}")
"""The code of a rule."""

SHAPES = 3
"""Shapes of modules that gain nothing up to which each has a line of its own."""


@dataclass(frozen=True)
class Island:
    """Scopes of one shape (`blocks.*.norm`) that a plan gives the same precision for the same reasons.

    functions: what stays FP32 in low ones; none where all of it does.

    Those that gain nothing stand together whatever their shape, where they have more than `SHAPES`; pattern is "" then.
    """

    pattern: str
    paths: tuple[str, ...]
    precision: str
    because: tuple[str, ...]
    kind: str = ""
    functions: tuple[str, ...] = ()
    what: str = "module"

    @property
    def name(self) -> str:
        """What it is called: a path, several as one, or the root's own operations; functions stay FP32 in all below, too."""
        modules = listed(self.paths, 2, self.what)
        within = "the whole model" if self.paths == ("",) else modules
        return f"{', '.join(self.functions)} in {within}" if self.functions else modules

    @property
    def which(self) -> str:
        """All of its paths, where the name does not say them."""
        full = ", ".join(each(found) if len(found) > 1 else own(found[0]) for found in _by_shape(self.paths))
        return "" if full == listed(self.paths, 2) else full

    @property
    def why(self) -> str:
        """Why, in a clause, and the rules that fired on it behind that."""
        codes = [text for text in self.because if _CODE.fullmatch(text)]
        words = [text for text in self.because if not _CODE.fullmatch(text)]
        return f"{', '.join(words)} ({', '.join(codes)})" if words and codes else ", ".join(words or codes)


def own(path: str) -> str:
    """A module by its path; the root stands for what it computes itself, since modules in it have entries of their own."""
    return path or "(the model's own operations)"


def listed(paths: Sequence[str], most: int, what: str = "module") -> str:
    """Modules, or operations, those of repeated blocks under one pattern, `most` of these and how many modules more."""
    groups = _by_shape(paths)
    if len(groups) == most + 1 and len(groups[-1]) == 1:
        most += 1
    names = [braced(found) if len(found) > 1 else own(found[0]) for found in groups[:most]]
    left = sum(map(len, groups[most:]))
    return ", ".join(names) + (f" and {count(left, f'more {what}')}" if left else "")


def _by_shape(paths: Sequence[str]) -> list[list[str]]:
    shapes: dict[str, list[str]] = {}
    for path in paths:
        shapes.setdefault(pattern(path), []).append(path)
    return list(shapes.values())


def precision_of(path: str, plan: Plan) -> str:
    """The precision a plan gives a module: its own entry's, or its nearest ancestor's."""
    listed = nearest(path, plan.scopes)
    return "fp32" if listed is None else plan.scopes[listed].precision


def islands(plan: Plan) -> tuple[Island, ...]:
    """The modules that stay FP32, repeated blocks folded into one; without reasons, the scopes that differ from the root.

    Of a program, the operations, those of one kind that stay for the same kind of reason folded into one.
    """
    if plan.program is not None:
        return _operations(plan.program)
    return (*(_kept(plan) if plan.reasons else _apart(plan)), *_exceptions(plan))


def _exceptions(plan: Plan) -> tuple[Island, ...]:
    """Functions that low modules keep in FP32."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, choice in plan.scopes.items():
        if choice.keep:
            groups.setdefault((pattern(path), choice.keep), []).append(path)
    return tuple(
        Island(shape, tuple(paths), "fp32", plan.scopes[paths[0]].because, "", functions)
        for (shape, functions), paths in groups.items()
    )


def _kept(plan: Plan) -> tuple[Island, ...]:
    groups: dict[tuple[str, str], list[tuple[str, Reason]]] = {}
    shapes = {pattern(path) for reason in plan.reasons if reason.kind == "no-gain" for path in reason.modules}
    idle = {"no-gain"} if len(shapes) > SHAPES else set()
    for reason in plan.reasons:
        for path in reason.modules if reason.kind != "not-floating" else ():
            shape = "" if reason.kind in idle else pattern(path)
            groups.setdefault((shape, reason.kind), []).append((path, reason))
    return tuple(
        Island(shape, tuple(path for path, _ in found), "fp32", _shared_words(plan, found), kind)
        for (shape, kind), found in groups.items()
    )


def _operations(program: Program) -> tuple[Island, ...]:
    groups: dict[tuple[str, str], list[Kept]] = {}
    for kept in program.kept:
        groups.setdefault((kept.kind, kept.op), []).append(kept)
    return tuple(
        Island(
            op,
            tuple(each.name for each in found),
            "fp32",
            (found[0].because + ("; the others likewise" if len({each.because for each in found}) > 1 else ""),),
            kind,
            what="operation",
        )
        for (kind, op), found in groups.items()
    )


def _shared_words(plan: Plan, found: Sequence[tuple[str, Reason]]) -> tuple[str, ...]:
    """Codes of rules, then why: the clause of all of them, or of the first with how far those of the others reach."""
    codes = {code: None for path, _ in found for code in rule_codes(plan, path)}
    words = {re.sub(r"_\d+\b", "", reason.words): reason.words for _, reason in found}
    first = next(iter(words.values()))
    if len(words) == 1:
        return (*codes, first)
    adds = [reason.adds for _, reason in found if reason.adds is not None]
    if len(adds) < len(found):
        return (*codes, f"{first}; the others likewise")
    low, high = apart(max(min(adds), 0.0), max(max(adds), 0.0))
    saves = max(reason.saves or 0.0 for _, reason in found)
    idle = found[0][1].kind == "no-gain"  # its numbers are the largest of several
    reach = f"at most {high}" if idle else f"{low} to {high}" if low != high else low
    many = f"lowering one of them adds {reach} of error"
    return (
        *codes,
        f"{many}, and {'at most ' if saves > 0 else ''}{gained(saves, plan.objective)}{_limit(found[0][1])}",
    )


def _limit(reason: Reason) -> str:
    """What a folded clause ends with."""
    if reason.kind in ("budget", "margin") and reason.left is not None:
        return f"; {reason.left:.2g} of the budget is left"
    return ""


def rule_codes(plan: Plan, path: str) -> tuple[str, ...]:
    """Codes of the rules that fired on what makes a scope stay FP32."""
    because = plan.scopes[path].because if path in plan.scopes else ()
    return tuple(text for text in because if _CODE.fullmatch(text))


def _apart(plan: Plan) -> tuple[Island, ...]:
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for path, choice in plan.scopes.items():
        if path and not choice.keep:
            alike = tuple(re.sub(r"_\d+\b", "", why) for why in choice.because)  # the nodes of blocks are numbered
            groups.setdefault((pattern(path), choice.precision, alike), []).append(path)
    return tuple(
        Island(shape, tuple(paths), low, plan.scopes[paths[0]].because) for (shape, low, _), paths in groups.items()
    )
