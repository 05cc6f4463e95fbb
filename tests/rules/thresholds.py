"""Every numeric threshold of the rule files, and facts drawn so that it alone decides its condition.

What the rules should say stands in thresholds.toml: the last value at which a condition is not met, and the first at
which it is. Both lie a millionth, or one unit of a whole number, apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.rulebook.conditions import Condition, evaluate
from auditor.rulebook.facts import FACTS, NodeFacts, fact_at
from auditor.rulebook.rule import Rule

FILE = Path(__file__).with_name("thresholds.toml")
NEAR, NEXT_TO_ZERO = 1e-6, 1e-30
"""Relative distance of two numbers that count as neighbours, and the absolute one next to 0."""

_EDGES = ("above", "at_least", "below", "at_most")
_POINTS = ("equals", "contains")
_WHOLE = {item.name for item in dataclasses.fields(NodeFacts) if str(item.type).startswith("int")}
_BLANK: Mapping[str, Any] = {"text": "", "flag": False, "number": None, "texts": (), "numbers": ()}


@dataclass(frozen=True)
class Threshold:
    """A number that a rule compares a fact with. key: `fact comparison`, behind `node: ` in a chain's node."""

    code: str
    key: str
    condition: Condition
    fact: str
    comparison: str
    bound: float


@dataclass(frozen=True)
class Entry:
    """What thresholds.toml says of one: values at which the condition is met, and is not, all else equal."""

    code: str
    key: str
    fires: float
    silent: tuple[float, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.code}, {self.key}"


def thresholds(rules: Sequence[Rule]) -> list[Threshold]:
    """In the order of the rules."""
    found = []
    for rule in rules:
        found += _in_condition(rule.code, "", rule.when)
        for name, node in rule.match.nodes.items():
            found += _in_condition(rule.code, f"{name}: ", node.when)
    return found


def entries(file: Path = FILE) -> list[Entry]:
    """What the file says, line by line."""
    found = []
    for code, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for key, given in table.items():
            silent = given["silent"] if isinstance(given["silent"], list) else [given["silent"]]
            found.append(Entry(code, key, given["fires"], tuple(silent), given["why"]))
    return found


def line_for(threshold: Threshold) -> str:
    """The line of thresholds.toml that goes with what the rule says now; its reason is left to write."""
    up, down = (_neighbour(threshold.fact, threshold.bound, step) for step in (1, -1))
    bound = _typed(threshold.fact, threshold.bound)
    fires, silent = {
        "above": (up, bound),
        "at_least": (bound, down),
        "below": (down, bound),
        "at_most": (bound, up),
    }.get(threshold.comparison, (bound, [down, up]))
    return f'"{threshold.key}" = {{ fires = {fires}, silent = {silent}, why = "" }}'


def departures(rules: Sequence[Rule], expected: Sequence[Entry]) -> list[str]:
    """Entries that the rules do not live up to, each with what the rule says instead."""
    found = thresholds(rules)
    return [problem for entry in expected for problem in departure(found, entry)]


def departure(found: Sequence[Threshold], entry: Entry) -> list[str]:
    """At most one line: how the thresholds of the rules differ from an entry."""
    meant = [item for item in found if (item.code, item.key) == (entry.code, entry.key)]
    if not meant:
        return [f"{entry}: no rule has this threshold; if it is gone on purpose, so should be its line"]
    for threshold in meant:
        for silent in entry.silent:
            if not decides(threshold.condition, threshold.fact, silent, entry.fires):
                says = f"silent at {silent}, fires at {entry.fires} expected; the rule says {threshold.bound}"
                return [f"{entry}: {says}: if on purpose, its line becomes\n    {line_for(threshold)}"]
    return []


def decides(condition: Condition, fact: str, silent: float, fires: float) -> bool:
    """Whether there are facts, equal but for this one, that leave the condition false and make it true."""
    facts = _facts_of(condition)
    others = [name for name in facts if name != fact]
    for values in itertools.product(*(_candidates(name, facts[name]) for name in others)):
        given = dict(zip(others, values, strict=True))
        if evaluate(condition, node_facts({**given, fact: _shaped(fact, fires)})) is not True:
            continue
        if evaluate(condition, node_facts({**given, fact: _shaped(fact, silent)})) is False:
            return True
    return False


def node_facts(given: Mapping[str, Any]) -> NodeFacts:
    """Facts of a node of which nothing is known but what is given."""
    values = {name: {} if fact.by_format else _BLANK[fact.type] for name, fact in FACTS.items()}
    for address, value in given.items():
        name, _, fmt = address.partition(".")
        values[name] = {**values[name], fmt: value} if fmt else value
    return NodeFacts(**values)


def neighbours(entry: Entry, fact: str) -> bool:
    """Whether nothing lies between the values of an entry that fire and that do not."""
    for silent in entry.silent:
        width = 1.01 * (NEAR * abs(entry.fires) if entry.fires and silent else NEXT_TO_ZERO)
        if not 0 < abs(entry.fires - silent) <= (1 if fact in _WHOLE else width):
            return False
    return True


def _in_condition(code: str, place: str, condition: Condition) -> Iterator[Threshold]:
    for leaf in _leaves(condition):
        for comparison, bound in leaf.comparisons.items():
            if fact_at(leaf.fact).type not in ("number", "numbers") or comparison == "present":
                continue
            if comparison not in (*_EDGES, *_POINTS):
                raise ValueError(f"{code}: no cases are drawn for numbers under {comparison!r}: teach this file how")
            yield Threshold(code, f"{place}{leaf.fact} {comparison}", condition, leaf.fact, comparison, bound)


def _leaves(condition: Condition) -> Iterator[Condition]:
    if condition.kind == "fact":
        yield condition
    for part in condition.parts:
        yield from _leaves(part)


def _facts_of(condition: Condition) -> dict[str, list[tuple[str, Any]]]:
    """{fact: what it is compared with}."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for leaf in _leaves(condition):
        found.setdefault(leaf.fact, []).extend(leaf.comparisons.items())
    return found


def _candidates(fact: str, compared: Sequence[tuple[str, Any]]) -> list[Any]:
    """Values of a fact that tell all its comparisons apart."""
    kind = fact_at(fact).type
    if kind == "flag":
        return [True, False]
    bounds = [item for _, bound in compared for item in (bound if isinstance(bound, tuple) else (bound,))]
    bounds = [bound for bound in bounds if not isinstance(bound, bool)]
    if kind == "number":
        return [None, *(_neighbour(fact, bound, step) for bound in bounds for step in (0, 1, -1))]
    texts = [bound.replace("*", "x") if isinstance(bound, str) else bound for bound in bounds]
    return ["", *texts] if kind == "text" else [(), *((text,) for text in texts), tuple(texts)]


def _shaped(fact: str, value: float) -> Any:
    return (value,) if fact_at(fact).type == "numbers" else value


def _typed(fact: str, value: float) -> float:
    return int(value) if fact in _WHOLE else float(value)


def _neighbour(fact: str, value: float, step: int) -> float:
    """The value itself (step 0), the next above it (1) or below it (-1)."""
    if fact in _WHOLE:
        return int(value) + step
    return float(f"{value * (1 + step * NEAR) if value > 0 else value * (1 - step * NEAR) or step * NEXT_TO_ZERO:.9g}")
