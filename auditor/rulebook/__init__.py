"""The rules: data files, read into Rule records, checked against a schema, and matched on a graph."""

from .conditions import evaluate, facts_used
from .explain import explain
from .load import load_rules
from .patterns import Matcher
from .reference import reference
from .rule import Chain, ChainNode, Condition, Match, Rule

__all__ = [
    "Chain",
    "ChainNode",
    "Condition",
    "Match",
    "Matcher",
    "Rule",
    "evaluate",
    "explain",
    "facts_used",
    "load_rules",
    "reference",
]
