"""The form of a rule file: which keys it has, of which types, and how they become a Rule."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

from ..numerics.formats import narrower
from .conditions import COMPARISONS
from .facts import EACH, FACTS, address_problem, fact_at
from .message import FORMATS, ByFormat, clauses, facts_shown, filled
from .reader import Reader
from .rule import CONFIDENCES, POSITIONS, SEVERITIES, STATUSES, Chain, ChainNode, Condition, Example, Match, Rule

_KEYS = (
    *("code", "name", "since", "status", "severity", "confidence", "formats"),
    *("match", "when", "message", "why", "advice", "references", "example", "supersedes", "measurable"),
)
_GROUPS = ("all", "any", "not")
_SAMPLES: dict[str, Any] = {"text": "x", "flag": True, "number": 1.0, "texts": ("x",), "numbers": (1.0,)}
_PYTHON: dict[str, tuple[type, ...]] = {"flag": (bool,), "text": (str,), "number": (int, float)}
ALWAYS = Condition("all")


def parse_rule(path: Path, text: str, table: dict[str, Any]) -> Rule:
    """The Rule in a parsed file; its family is the directory it lies in.

    Raises: RuleError(slug="rule-unknown-key" | "rule-missing-key" | "rule-bad-type" | "rule-bad-value").
    """
    reader = Reader(path, text, table)
    reader.allow(_KEYS)
    rule = Rule(
        code=reader.text("code", pattern=r"[A-Z]{3}\d{3}"),
        name=reader.text("name", pattern=r"[a-z0-9]+(-[a-z0-9]+)*"),
        family=path.parent.name,
        since=reader.text("since", pattern=r"\d+\.\d+\.\d+"),
        status=reader.text("status", STATUSES),
        severity=reader.text("severity", SEVERITIES),
        confidence=reader.text("confidence", CONFIDENCES),
        formats=reader.texts("formats", (*narrower(), EACH)),
        match=_match(reader.reader("match")),
        when=_conditions(reader, "when"),
        message=_message(reader),
        why=reader.text("why").strip(),
        advice=reader.text("advice").strip("\n"),
        references=reader.texts("references"),
        path=path,
        example=_example(reader.reader("example")) if "example" in table else None,
        supersedes=reader.texts("supersedes") if "supersedes" in table else (),
        measurable=reader.flag("measurable") if "measurable" in table else True,
    )
    if path.stem != f"{rule.code}-{rule.name}":
        reader.fail("name", f"the file must be called {rule.code}-{rule.name}.toml", "rule-bad-value")
    return rule


def _example(reader: Reader) -> Example:
    reader.allow(("code", "fixed", "inputs", "changes"))
    has = reader.table.keys()
    return Example(
        code=reader.text("code").strip("\n"),
        fixed=reader.text("fixed").strip("\n") if "fixed" in has else "",
        inputs=reader.texts("inputs") if "inputs" in has else (),
        changes=reader.text("changes") if "changes" in has else "",
    )


def _match(reader: Reader) -> Match:
    reader.allow(("ops", "position", "owner_type", "chain"))
    if not reader.table:
        reader.fail("match", "says nothing; give ops, position, owner_type or chain", "rule-missing-key")
    has = reader.table.keys()
    chains = [chain for item in reader.readers("chain") for chain in _chains(item)] if "chain" in has else []
    return Match(
        ops=reader.texts("ops") if "ops" in has else (),
        position=reader.text("position", POSITIONS) if "position" in has else None,
        owner_type=reader.text("owner_type") if "owner_type" in has else None,
        chains=tuple(chains),
    )


def _chains(reader: Reader) -> list[Chain]:
    """The alternatives a chain stands for: a name that ends in `?` in its paths may be left out."""
    reader.allow(("paths", "report", "nodes"))
    drawn = reader.texts("paths")
    marked = [[name.strip() for name in path.split(">")] for path in drawn]
    optional = sorted({name[:-1] for path in marked for name in path if name.endswith("?")})
    paths = [[name.rstrip("?") for name in path] for path in marked]
    named = reader.reader("nodes")
    nodes = {name: _chain_node(named.reader(name)) for name in named.table}
    report = reader.text("report", tuple(nodes))
    for path in paths:
        for name in path:
            if name not in nodes:
                reader.fail("paths", f"{name!r} is not described under nodes", "rule-bad-value")
    used = {name for path in paths for name in path}
    if used != set(nodes) or report in optional:
        reader.fail("nodes", "every node stands on a path, and the reported one is not optional", "rule-bad-value")
    left_out = product(*((frozenset(), frozenset({name})) for name in optional))
    return [
        Chain(*_without(frozenset().union(*choice), nodes, paths), report=report, paths=drawn) for choice in left_out
    ]


def _without(
    left_out: frozenset[str], nodes: dict[str, ChainNode], paths: list[list[str]]
) -> tuple[dict[str, ChainNode], tuple[tuple[str, str], ...]]:
    kept = [[name for name in path if name not in left_out] for path in paths]
    edges = {edge: None for path in kept for edge in pairwise(path)}
    return {name: node for name, node in nodes.items() if name not in left_out}, tuple(edges)


def _chain_node(reader: Reader) -> ChainNode:
    reader.allow(("ops", "when"))
    return ChainNode(reader.texts("ops"), _conditions(reader, "when") if "when" in reader.table else ALWAYS)


def _conditions(reader: Reader, name: str) -> Condition:
    return Condition("all", parts=tuple(_condition(item) for item in reader.readers(name)))


def _condition(reader: Reader) -> Condition:
    groups = [name for name in _GROUPS if name in reader.table]
    if not groups:
        return _leaf(reader)
    reader.allow(groups[:1])
    if groups[0] == "not":
        return Condition("not", parts=(_condition(reader.reader("not")),))
    if not reader.readers(groups[0]):
        reader.fail(groups[0], "must hold at least one condition", "rule-bad-value")
    return Condition(groups[0], parts=_conditions(reader, groups[0]).parts)


def _leaf(reader: Reader) -> Condition:
    fact = reader.text("fact")
    problem = address_problem(fact, f"not one of {', '.join(FACTS)}")
    if problem:
        reader.fail("fact", problem, "rule-bad-value")
    allowed = COMPARISONS[fact_at(fact).type]
    reader.allow(("fact", *allowed))
    comparisons = {name: _operand(reader, fact, name) for name in reader.table if name != "fact"}
    if not comparisons:
        reader.fail("fact", f"compares {fact} with nothing; it allows {', '.join(allowed)}", "rule-missing-key")
    return Condition("fact", fact, comparisons)


def _operand(reader: Reader, fact: str, comparison: str) -> Any:
    value = reader.table[comparison]
    kind = "flag" if comparison == "present" else fact_at(fact).type.removesuffix("s")
    if comparison == "is_in" and not isinstance(value, list):
        reader.fail(comparison, "must be a list", "rule-bad-type")
    values = value if comparison == "is_in" else [value]
    wanted = _PYTHON[kind]
    for item in values:
        if not isinstance(item, wanted) or (kind == "number" and isinstance(item, bool)):
            reader.fail(comparison, f"{fact} is a {kind}; {item!r} is none", "rule-bad-type")
    return tuple(values) if comparison == "is_in" else value


def _message(reader: Reader) -> str:
    message = reader.text("message").strip()
    try:
        for name in facts_shown(message):
            problem = None if name == FORMATS or _in_all_formats(name) else address_problem(name)
            if problem:
                reader.fail("message", problem, "rule-bad-value")
        for name in clauses(message):
            if name not in narrower():
                reader.fail("message", f"has a clause on {name!r}, which is no format", "rule-bad-value")
        filled(message, _sample, narrower())
    except (ValueError, TypeError, IndexError) as error:
        reader.fail("message", f"is no valid template: {error}", "rule-bad-value")
    return message


def _in_all_formats(name: str) -> bool:
    return name in FACTS and FACTS[name].by_format


def _sample(name: str) -> Any:
    sample = _SAMPLES[fact_at(name).type]
    return ByFormat(fp16=sample, bf16=sample) if _in_all_formats(name) else sample
