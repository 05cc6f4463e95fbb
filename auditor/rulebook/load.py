"""Loads rule files; an invalid file raises an error with file, line and key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import networkx as nx
from pydantic import TypeAdapter, ValidationError

from ..errors import AuditorError
from ..resources import resource_dir, tables
from .conditions import Condition
from .facts import EACH, SCHEME
from .rule import ChainNode, Rule

_RULE, _NODES = TypeAdapter(Rule), TypeAdapter(dict[str, ChainNode])
_CALLED = re.compile(r"[A-Z]{3}\d{3}(-[a-z0-9]+)+")
_SAID = {
    "missing": ("is missing", "rule-missing-key"),
    "unexpected_keyword_argument": ("unknown key", "rule-unknown-key"),
}
_AS_GIVEN = Condition("fact", "upcast", {"equals": False})


def load_rules(directories: Sequence[Path] | None = None) -> tuple[Rule, ...]:
    """Every rule under the directories (`<family>/<CODE>-<name>.toml`), by code; by default the built-in rules.

    Chain nodes shared by several rules of a directory are in its `nodes.toml`. Raises: AuditorError(slug="rule-..."),
    also for a directory without rules, a duplicate code, a family whose codes have different prefixes, and an invalid
    `supersedes`. A process reads unchanged files only once.
    """
    folders = (resource_dir("rules"),) if directories is None else tuple(directories)
    files = (file for folder in folders for file in sorted(folder.glob("**/*.toml")))
    return _load(folders, tuple((file, file.stat().st_mtime_ns) for file in files))


@cache
def _load(directories: Sequence[Path], state: Sequence[tuple[Path, int]]) -> tuple[Rule, ...]:
    """Load and check the rules. state: files and modification times; if these change, the cache does not apply."""
    rules: list[Rule] = []
    for directory in directories:
        paths = sorted(directory.glob("*/*.toml"))
        if not paths:
            raise AuditorError(f"{directory} contains no rule; expected <family>/<CODE>-<name>.toml", "rule-none-found")
        common = directory / "nodes.toml"
        shared = _validate(common, _NODES, tables(common, "rule-not-toml")) if common.exists() else {}
        rules += [_read(path, shared) for path in paths]
    _check_codes(rules)
    _check_superseded({rule.code: rule for rule in rules})
    return tuple(sorted(rules, key=lambda rule: rule.code))


def spread(rules: Sequence[Rule], formats: Sequence[str], schemes: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules; a rule for EACH or SCHEME is copied to every audited format or scheme that no other rule of its
    family covers."""
    every, result = {EACH: formats, SCHEME: schemes}, list[Rule]()
    named = {(rule.family, fmt) for rule in rules for fmt in rule.formats}
    for rule in rules:
        if (word := next((fmt for fmt in rule.formats if fmt in every), None)) is None:
            result.append(rule)
            continue
        for fmt in (fmt for fmt in every[word] if (rule.family, fmt) not in named):
            message = re.sub(rf"\.{word}\b", f".{fmt}", rule.message)
            result.append(replace(rule, formats=(fmt,), when=_in(rule.when, word, fmt), message=message))
    return tuple(result)


def _in(condition: Condition, word: str, fmt: str) -> Condition:
    fact = re.sub(rf"\.{word}$", f".{fmt}", condition.fact)
    return replace(condition, fact=fact, parts=tuple(_in(part, word, fmt) for part in condition.parts))


def _read(path: Path, shared: Mapping[str, ChainNode]) -> Rule:
    table = tables(path, "rule-not-toml")
    if not _CALLED.fullmatch(path.stem):
        _refuse(path, (), "must be called <CODE>-<name>.toml, such as OWN001-the-bad-thing.toml")
    rule: Rule = _validate(path, _RULE, {**table, "path": path})
    if rule.match.chains:
        rule = replace(rule, match=replace(rule.match, nodes={**shared, **rule.match.nodes}))
    for chain in rule.match.chains:
        drawn = [name for nodes in chain.steps for name in nodes]
        for name in drawn:
            if name.rstrip("?") not in rule.match.nodes:
                _refuse(path, ("match", "chain", "paths"), f"{name!r} is not defined under nodes")
        if chain.report not in drawn:
            _refuse(path, ("match", "chain", "report"), f"{chain.report!r} must be a step of the paths, without '?'")
    return rule if rule.upcast else replace(rule, when=replace(rule.when, parts=(_AS_GIVEN, *rule.when.parts)))


def _validate(path: Path, form: TypeAdapter[Any], table: Mapping[str, Any]) -> Any:
    try:
        return form.validate_python(table)
    except ValidationError as error:
        worst = min(error.errors(), key=lambda one: one["type"] != "unexpected_keyword_argument")
        place, kind, problem = (*worst["loc"], *worst.get("ctx", {}).get("at", ())), worst["type"], worst["msg"]
        if kind in _SAID:
            _refuse(path, place, *_SAID[kind])
        if kind.startswith("rule-"):
            _refuse(path, place, problem, kind)
        wrong = f"{problem.lower()}, not {worst['input']!r}"
        _refuse(path, place, wrong, "rule-bad-type" if kind.endswith("_type") else "rule-bad-value")


def _check_codes(rules: Sequence[Rule]) -> None:
    codes, prefixes = dict[str, Rule](), dict[str, Rule]()
    for rule in rules:
        other = codes.setdefault(rule.code, rule)
        if other is not rule:
            _refuse(rule.path, (), f"the code {rule.code} is already used by {other.path}", slug="rule-code-twice")
        first = prefixes.setdefault(rule.family, rule)
        if first.code[:3] != rule.code[:3]:
            _refuse(rule.path, (), f"codes of family {rule.family!r} begin with {first.code[:3]}", slug="rule-prefix")


def _check_superseded(rules: dict[str, Rule]) -> None:
    """Check that each superseded rule exists, covers no further formats, and does not supersede in return."""
    order = nx.DiGraph([(rule.code, code) for rule in rules.values() for code in rule.supersedes])
    for rule in rules.values():
        for code in rule.supersedes:
            if code not in rules:
                _refuse(rule.path, ("supersedes",), f"no rule is called {code!r}")
            if left_out := ", ".join(sorted(set(rules[code].formats).difference(rule.formats))):
                _refuse(rule.path, ("supersedes",), f"{code} also covers {left_out}, which {rule.code} does not")
            if nx.has_path(order, code, rule.code):
                _refuse(rule.path, ("supersedes",), f"{code} supersedes {rule.code} in turn")


def _refuse(path: Path, place: Sequence[str | int], problem: str, slug: str = "rule-bad-value") -> NoReturn:
    """Raise AuditorError with the problem, and the file, line and key where it is."""
    key = ""
    for part in place:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    key = key.removeprefix(".")
    shown = key if key.isprintable() else ascii(key)
    line = _line(path.read_text(encoding="utf-8"), place)
    raise AuditorError(f"{path}:{line}: {shown or 'file'}: {problem}", slug)


def _line(text: str, place: Sequence[str | int]) -> int:
    """Line number of a key in a rule file; if the key is missing, of its table's header or name; else 1.

    TOML readers keep no positions, so the text is searched, table by table along the key's path. In a list of tables,
    the first table with the key counts.
    """
    at = 0
    for name in [part for part in place if isinstance(part, str)]:
        pattern = rf"(?:^\s*|[{{,]\s*|^\[+[\w.]*|\.){re.escape(name)}(?:\s*=|\]|\.)"
        result = re.compile(pattern, re.MULTILINE).search(text, at)
        at = result.end() if result else at
    return text.count("\n", 0, at) + 1
