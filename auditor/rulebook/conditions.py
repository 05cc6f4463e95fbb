"""Conditions on named facts: a small typed language in TOML, evaluated without executing any text as code.

A condition on an unknown fact is neither true nor false, also under `not`: a rule applies only if its facts are known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, LiteralString

from pydantic_core import PydanticCustomError

from .facts import NodeFacts, address_problem, fact_at, value_at

_HOLDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "above": operator.gt,
    "at_least": operator.ge,
    "below": operator.lt,
    "at_most": operator.le,
    "equals": operator.eq,
    "matches": fnmatchcase,
    "contains": lambda value, wanted: any(
        fnmatchcase(item, wanted) if isinstance(item, str) else item == wanted for item in value
    ),
}

COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "number": ("above", "at_least", "below", "at_most", "equals", "present"),
    "text": ("equals", "matches", "present"),
    "flag": ("equals",),
    "texts": ("contains", "present"),
    "numbers": ("contains", "present"),
}
"""{type of fact: its comparisons}. `matches` and `contains` on texts take globs; a non-empty list is `present`."""

_PYTHON: Mapping[str, tuple[type, ...]] = {"flag": (bool,), "text": (str,), "number": (int, float)}


@dataclass(frozen=True)
class Condition:
    """A leaf (`fact` with `comparisons`, all of which must hold) or a group: kind is fact | all | any | not."""

    kind: str
    fact: str = ""
    comparisons: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Condition, ...] = ()


ALWAYS = Condition("all")


def all_of(given: Any) -> Condition:
    """Parse the conditions of a rule file. Raises: PydanticCustomError, whose `at` is the location of the error."""
    return Condition("all", parts=_conditions(given, ()))


def evaluate(condition: Condition, facts: NodeFacts) -> bool | None:
    """Whether the condition holds; None if that depends on an unknown fact."""
    if condition.kind == "fact":
        return _leaf_holds(condition, facts)
    answers = [evaluate(part, facts) for part in condition.parts]
    if condition.kind == "not":
        return None if answers[0] is None else not answers[0]
    decisive = condition.kind == "any"  # one True decides an `any`, one False an `all`
    if decisive in answers:
        return decisive
    return None if None in answers else not decisive


def facts_used(condition: Condition) -> Iterator[str]:
    """Names of the facts that a condition reads, in the order written."""
    if condition.kind == "fact":
        yield condition.fact
    for part in condition.parts:
        yield from facts_used(part)


def describe(condition: Condition) -> str:
    """Describe a rule's condition in words."""
    if condition.kind == "fact":
        return " and ".join(_words(condition.fact, name, value) for name, value in condition.comparisons.items())
    if condition.kind == "not":
        return f"not ({describe(condition.parts[0])})"
    joined = (" or " if condition.kind == "any" else ", and ").join(describe(part) for part in condition.parts)
    return f"({joined})" if condition.kind == "any" else joined


def _words(fact: str, comparison: str, value: Any) -> str:
    if comparison == "present":
        kinds = ("empty", "not empty") if fact_at(fact).type.endswith("s") else ("unknown", "known")
        return f"`{fact}` is {kinds[value]}"
    unit = fact_at(fact).unit
    suffix = f" {unit}" if unit not in ("", "1") else ""
    verb = comparison if comparison in ("matches", "contains") else f"is {comparison.replace('_', ' ')}"
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"`{fact}` {verb.removesuffix(' equals')} {shown}{suffix}"


def _leaf_holds(condition: Condition, facts: NodeFacts) -> bool | None:
    value = value_at(facts, condition.fact)
    others = {name: wanted for name, wanted in condition.comparisons.items() if name != "present"}
    if len(others) < len(condition.comparisons) and (value in (None, ())) == condition.comparisons["present"]:
        return False
    if value is None and others:
        return None
    return all(_HOLDS[name](value, wanted) for name, wanted in others.items())


Place = tuple[str | int, ...]


def _conditions(given: Any, at: Place) -> tuple[Condition, ...]:
    if not isinstance(given, list):
        raise refusal("must be a list of tables", slug="rule-bad-type", at=at)
    return tuple(_condition(item, (*at, index)) for index, item in enumerate(given))


def _condition(given: Any, at: Place) -> Condition:
    if not isinstance(given, dict):
        raise refusal("must be a table", slug="rule-bad-type", at=at)
    group = next((name for name in ("all", "any", "not") if name in given), None)
    if group is None:
        return _leaf(given, at)
    _allow(given, at, (group,))
    at = (*at, group)
    parts = (_condition(given[group], at),) if group == "not" else _conditions(given[group], at)
    return Condition(group, parts=parts)


def _leaf(given: dict[str, Any], at: Place) -> Condition:
    fact = given.get("fact")
    if not isinstance(fact, str):
        raise refusal("must name a fact", slug="rule-missing-key", at=(*at, "fact"))
    if problem := address_problem(fact):
        raise refusal(problem, at=(*at, "fact"))
    allowed = COMPARISONS[fact_at(fact).type]
    _allow(given, at, ("fact", *allowed))
    comparisons = {name: value for name, value in given.items() if name != "fact"}
    if not comparisons:
        nothing = f"has no comparison for {fact}; allowed: {', '.join(allowed)}"
        raise refusal(nothing, slug="rule-missing-key", at=(*at, "fact"))
    for name, value in comparisons.items():
        kind = "flag" if name == "present" else fact_at(fact).type.removesuffix("s")
        if not isinstance(value, _PYTHON[kind]) or (kind == "number" and isinstance(value, bool)):
            raise refusal(f"{fact} is a {kind}, and {value!r} is not", slug="rule-bad-type", at=(*at, name))
    return Condition("fact", fact, comparisons)


def _allow(given: Mapping[str, Any], at: Place, names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            raise refusal("unknown key", slug="rule-unknown-key", at=(*at, name))


def refusal(problem: str, slug: LiteralString = "rule-bad-value", at: Place = ()) -> PydanticCustomError:
    """The error for an invalid value in a rule file. at: location of the value, relative to pydantic's location."""
    return PydanticCustomError(slug, "{problem}", {"problem": problem, "at": at})
