"""Rule files on disk become Rules."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import networkx as nx

from ..errors import RuleError
from ..numerics.formats import narrower
from ..resources import resource_dir
from .reader import Reader
from .rule import Rule
from .schema import parse_rule


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


def _read(path: Path) -> Rule:
    try:
        return _parsed(path, path.read_text(encoding="utf-8"), tuple(narrower()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        line = re.search(r"at line (\d+)", str(error))
        raise RuleError(f"{path}:{line[1] if line else 1}: file: {error}", slug="rule-not-toml") from error


@lru_cache(maxsize=1024)
def _parsed(path: Path, text: str, formats: tuple[str, ...]) -> Rule:
    """Once for a text and the formats that are registered: a process may audit many models."""
    return parse_rule(path, text, tomllib.loads(text))


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
            if code not in rules:
                _refuse(rule, f"no rule is called {code!r}")
            left_out = set(rules[code].formats) - set(rule.formats)
            if left_out:
                _refuse(rule, f"{code} also speaks of {', '.join(sorted(left_out))}, which {rule.code} does not")
            if nx.has_path(order, code, rule.code):
                _refuse(rule, f"{code} supersedes {rule.code} in turn")


def _refuse(rule: Rule, problem: str) -> NoReturn:
    Reader(rule.path, rule.path.read_text(encoding="utf-8"), {}).fail("supersedes", problem, "rule-bad-value")
