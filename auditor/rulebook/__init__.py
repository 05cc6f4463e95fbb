"""The rules: data files, read into Rule records, checked against a schema, and matched on a graph."""

from .conditions import evaluate, facts_used
from .each import spread
from .explain import as_data, explain
from .load import load_rules
from .patterns import Matcher
from .reference import reference
from .rule import Chain, ChainNode, Condition, Example, Match, Rule

__all__ = [
    "Chain",
    "ChainNode",
    "Condition",
    "Example",
    "Match",
    "Matcher",
    "Rule",
    "as_data",
    "evaluate",
    "explain",
    "facts_used",
    "load_rules",
    "reference",
    "spread",
]
