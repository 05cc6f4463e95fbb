"""Rules that speak of `each` format, made into one for every format that is audited."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .facts import EACH
from .rule import Condition, Rule


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
    name, dot, of = condition.fact.partition(".")
    fact = f"{name}.{fmt}" if dot and of == EACH else condition.fact
    return replace(condition, fact=fact, parts=tuple(_in(part, fmt) for part in condition.parts))
