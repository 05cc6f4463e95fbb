"""Conditions over named facts: a small typed form, read from TOML and evaluated without running any text as code.

A condition on a fact that is not known is neither true nor false, and stays so under `not`: a rule fires only on what
is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from .facts import NodeFacts, fact_at, value_at
from .rule import Condition

_NUMERIC: Mapping[str, Callable[[float, float], bool]] = {
    "above": lambda value, bound: value > bound,
    "at_least": lambda value, bound: value >= bound,
    "below": lambda value, bound: value < bound,
    "at_most": lambda value, bound: value <= bound,
}

COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "number": (*_NUMERIC, "equals", "is_in", "present"),
    "text": ("equals", "is_in", "matches", "present"),
    "flag": ("equals",),
    "texts": ("contains", "present"),
    "numbers": ("contains", "present"),
}
"""Comparisons each type of fact allows. `matches` and `contains` on texts take globs; `present` on a list: not empty."""


def evaluate(condition: Condition, facts: NodeFacts) -> bool | None:
    """Whether the condition holds; None where it depends on a fact that is not known."""
    if condition.kind == "fact":
        return _leaf(condition, facts)
    answers = [evaluate(part, facts) for part in condition.parts]
    if condition.kind == "not":
        return None if answers[0] is None else not answers[0]
    decisive = condition.kind == "any"  # one True decides an `any`, one False an `all`
    if decisive in answers:
        return decisive
    return None if None in answers else not decisive


def facts_used(condition: Condition) -> Iterator[str]:
    """Addresses of the facts a condition reads, in the order written."""
    if condition.kind == "fact":
        yield condition.fact
    for part in condition.parts:
        yield from facts_used(part)


def describe(condition: Condition) -> str:
    """The condition in words, for people."""
    if condition.kind == "fact":
        return " and ".join(_words(condition.fact, name, value) for name, value in condition.comparisons.items())
    if condition.kind == "not":
        return f"not ({describe(condition.parts[0])})"
    joined = (" or " if condition.kind == "any" else ", and ").join(describe(part) for part in condition.parts)
    return f"({joined})" if condition.kind == "any" else joined


def _words(fact: str, comparison: str, value: Any) -> str:
    if comparison == "present":
        kinds = ("no", "some") if fact_at(fact).type.endswith("s") else ("unknown", "known")
        return f"{kinds[value]} {fact}"
    if isinstance(value, bool):
        return fact if value else f"not {fact}"
    unit = fact_at(fact).unit
    suffix = f" {unit}" if unit not in ("", "1") else ""
    shown = " or ".join(str(item) for item in value) if isinstance(value, tuple) else str(value)
    return f"{fact} {comparison.replace('_', ' ')} {shown}{suffix}"


def _leaf(condition: Condition, facts: NodeFacts) -> bool | None:
    value = value_at(facts, condition.fact)
    others = {name: wanted for name, wanted in condition.comparisons.items() if name != "present"}
    if len(others) < len(condition.comparisons) and (value in (None, ())) == condition.comparisons["present"]:
        return False
    if value is None and others:
        return None
    return all(_holds(value, name, wanted) for name, wanted in others.items())


def _holds(value: Any, comparison: str, wanted: Any) -> bool:
    if comparison in _NUMERIC:
        return _NUMERIC[comparison](value, wanted)
    if comparison == "is_in":
        return value in wanted
    if comparison == "matches":
        return fnmatchcase(value, wanted)
    if comparison == "contains":
        return any(fnmatchcase(item, wanted) if isinstance(item, str) else item == wanted for item in value)
    return bool(value == wanted)
