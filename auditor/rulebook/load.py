"""Rule files on disk become Rules; what is wrong with one is refused by its file, line and key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import networkx as nx
from pydantic import TypeAdapter, ValidationError

from ..errors import RuleError
from ..numerics.formats import narrower
from ..resources import resource_dir
from .conditions import Condition
from .facts import EACH
from .rule import Chain, ChainNode, Example, Match, Rule

_FORM = TypeAdapter(Rule)
_AS_GIVEN = Condition("fact", "upcast", {"equals": False})
_TABLES = {"match": Match, "chain": Chain, "nodes": ChainNode, "example": Example}


def load_rules(directories: Sequence[Path] | None = None) -> tuple[Rule, ...]:
    """Every rule under the directories (`<family>/<CODE>-<name>.toml`), by code; the shipped ones by default.

    Raises: RuleError(slug="rule-..."), also for a directory without rules, a code used twice, a family whose codes
    have different prefixes, and a rule that supersedes what it can not stand for.
    """
    rules: list[Rule] = []
    for directory in [resource_dir("rules")] if directories is None else directories:
        paths = sorted(Path(directory).glob("*/*.toml"))
        if not paths:
            raise RuleError(f"{directory} holds no rule; expected <family>/<CODE>-<name>.toml", slug="rule-none-found")
        rules += [_read(path) for path in paths]
    _check_codes(rules)
    _check_superseded({rule.code: rule for rule in rules})
    return tuple(sorted(rules, key=lambda rule: rule.code))


def spread(rules: Sequence[Rule], formats: Sequence[str]) -> tuple[Rule, ...]:
    """The rules, those that speak of each format once for every audited one that no other of their family speaks of."""
    named = {(rule.family, fmt) for rule in rules if EACH not in rule.formats for fmt in rule.formats}
    found: list[Rule] = []
    for rule in rules:
        if EACH in rule.formats:
            found += [_about(rule, fmt) for fmt in formats if (rule.family, fmt) not in named]
        else:
            found.append(rule)
    return tuple(found)


def _about(rule: Rule, fmt: str) -> Rule:
    message = re.sub(rf"\.{EACH}\b", f".{fmt}", rule.message)
    return replace(rule, formats=(fmt,), when=_in(rule.when, fmt), message=message)


def _in(condition: Condition, fmt: str) -> Condition:
    fact = re.sub(rf"\.{EACH}$", f".{fmt}", condition.fact)
    return replace(condition, fact=fact, parts=tuple(_in(part, fmt) for part in condition.parts))


def _read(path: Path) -> Rule:
    try:
        return _parsed(path, path.read_text(encoding="utf-8"), tuple(narrower()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        line = re.search(r"at line (\d+)", str(error))
        raise RuleError(f"{path}:{line[1] if line else 1}: file: {error}", slug="rule-not-toml") from error


@lru_cache(maxsize=1024)
def _parsed(path: Path, text: str, formats: tuple[str, ...]) -> Rule:
    """Once for a text and the formats that are registered: a process may audit many models."""
    table = tomllib.loads(text)
    if "path" in table:
        _refuse(path, text, ("path",), "unknown key", "rule-unknown-key")
    try:
        rule = _FORM.validate_python({**table, "path": path})
    except ValidationError as error:
        worst = min(error.errors(), key=lambda one: one["type"] != "unexpected_keyword_argument")
        place = (*worst["loc"], *worst.get("ctx", {}).get("at", ()))
        _refuse(path, text, place, *_said(worst, place))
    if path.stem != f"{rule.code}-{rule.name}":
        _refuse(path, text, ("name",), f"the file must be called {rule.code}-{rule.name}.toml")
    _check_match(rule, text)
    return rule if rule.upcast else replace(rule, when=replace(rule.when, parts=(_AS_GIVEN, *rule.when.parts)))


def _said(error: Mapping[str, Any], place: tuple[str | int, ...]) -> tuple[str, str]:
    """What pydantic found, in one clause, and the slug that it goes by."""
    kind = error["type"]
    if kind == "missing":
        return "is missing", "rule-missing-key"
    if kind == "unexpected_keyword_argument":
        form = next((_TABLES[part] for part in reversed(place[:-1]) if part in _TABLES), Rule)
        names = {"chains": "chain"}
        known = sorted(names.get(field.name, field.name) for field in fields(form) if field.name != "path")
        return f"unknown key; known here: {', '.join(known)}", "rule-unknown-key"
    if kind.startswith("rule-"):
        return error["msg"], kind
    wrong = f"{error['msg'].lower()}, not {error['input']!r}"
    return wrong, "rule-bad-type" if kind.endswith("_type") else "rule-bad-value"


def _check_match(rule: Rule, text: str) -> None:
    """Every chain is drawn of nodes that are there, and every node stands in one."""
    match, drawn = rule.match, [name for chain in rule.match.chains for path in chain.drawn for name in path]
    if match == Match():
        _refuse(
            rule.path, text, ("match",), "says nothing; give ops, position, owner_type or chain", "rule-missing-key"
        )
    for name in drawn:
        if name.rstrip("?") not in match.nodes:
            _refuse(rule.path, text, ("match", "chain", "paths"), f"{name!r} is not described under nodes")
    for chain in match.chains:
        if not any(chain.report in path for path in chain.drawn):
            _refuse(rule.path, text, ("match", "chain", "report"), f"{chain.report!r} is on no path, or may be missing")
    for name in match.nodes.keys() - {name.rstrip("?") for name in drawn}:
        _refuse(rule.path, text, ("match", "nodes", name), "stands on no path")


def _check_codes(rules: list[Rule]) -> None:
    codes: dict[str, Rule] = {}
    prefixes: dict[str, Rule] = {}
    for rule in rules:
        other = codes.setdefault(rule.code, rule)
        if other is not rule:
            raise RuleError(f"{rule.path}:1: code: {rule.code} is already used by {other.path}", slug="rule-code-twice")
        first = prefixes.setdefault(rule.family, rule)
        if first.code[:3] != rule.code[:3]:
            raise RuleError(
                f"{rule.path}:1: code: the family {rule.family!r} uses {first.code[:3]}", slug="rule-prefix"
            )


def _check_superseded(rules: dict[str, Rule]) -> None:
    """Each superseded rule exists, speaks of no format that its superseder leaves out, and does not supersede it back."""
    order = nx.DiGraph([(rule.code, code) for rule in rules.values() for code in rule.supersedes])
    for rule in rules.values():
        for code in rule.supersedes:
            left_out = set(rules[code].formats) - set(rule.formats) if code in rules else set()
            if code not in rules:
                problem = f"no rule is called {code!r}"
            elif left_out:
                problem = f"{code} also speaks of {', '.join(sorted(left_out))}, which {rule.code} does not"
            elif nx.has_path(order, code, rule.code):
                problem = f"{code} supersedes {rule.code} in turn"
            else:
                continue
            _refuse(rule.path, rule.path.read_text(encoding="utf-8"), ("supersedes",), problem)


def _refuse(path: Path, text: str, place: Sequence[str | int], problem: str, slug: str = "rule-bad-value") -> NoReturn:
    """Raises: RuleError, with file, line and key."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    shown = key if key.isprintable() else ascii(key)
    raise RuleError(f"{path}:{_line(text, place)}: {shown or 'file'}: {problem}", slug=slug)


def _line(text: str, place: Sequence[str | int]) -> int:
    """Line of the key where it is written, of its table's header or name otherwise, else 1.

    TOML readers keep no positions, so the text is searched, table by table on the way to the key; of tables in a list
    the first that has the key is taken.
    """
    at = 0
    for name in [part for part in place if isinstance(part, str)]:
        pattern = rf"(?:^\s*|[{{,]\s*|^\[+[\w.]*){re.escape(name)}(?:\s*=|\]|\.)"
        found = re.compile(pattern, re.MULTILINE).search(text, at)
        at = found.end() if found else at
    return text.count("\n", 0, at) + 1
