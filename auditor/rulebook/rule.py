"""What a rule file says, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEVERITIES = ("info", "warning", "error")
CONFIDENCES = ("low", "medium", "high")
STATUSES = ("stable", "preview", "retired")
POSITIONS = ("first", "last")


@dataclass(frozen=True)
class Condition:
    """A leaf (`fact` with `comparisons`, all of which must hold) or a group: kind is fact | all | any | not."""

    kind: str
    fact: str = ""
    comparisons: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class ChainNode:
    """One node of a chain: any of `ops` (exact, packet or glob), for which `when` holds."""

    ops: tuple[str, ...]
    when: Condition


@dataclass(frozen=True)
class Chain:
    """A small graph of ops, looked for with reshapes and casts left out. report: the node a finding names.

    paths: the graph as its file draws it, optional nodes included.
    """

    nodes: Mapping[str, ChainNode]
    edges: tuple[tuple[str, str], ...]
    report: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """Where a rule looks; everything given must hold. chains: alternatives, one of which must be found."""

    ops: tuple[str, ...] = ()
    position: str | None = None
    owner_type: str | None = None
    chains: tuple[Chain, ...] = ()


@dataclass(frozen=True)
class Example:
    """Code on which a rule fires, and the same code repaired ("" where there is nothing to repair).

    code, fixed: Python that defines `forward(...)`, or a module called `model`, with torch, nn and F at hand. inputs:
    one Python expression for each tensor that it is called with. changes: in what the repaired code differs from the
    other where both run in FP32, "" where in nothing but rounding.
    """

    code: str
    fixed: str
    inputs: tuple[str, ...]
    changes: str = ""


@dataclass(frozen=True)
class Rule:
    """One way for a model to be hurt by a format. status: stable | preview | retired (kept, never fires).

    supersedes: codes of more general rules, which say nothing where this one fires; it then speaks with the highest
    severity and confidence among them. measurable: whether running one operation low can bear the rule out.
    """

    code: str
    name: str
    family: str
    since: str
    status: str
    severity: str
    confidence: str
    formats: tuple[str, ...]
    match: Match
    when: Condition
    message: str
    why: str
    advice: str
    references: tuple[str, ...]
    path: Path
    example: Example | None = None
    supersedes: tuple[str, ...] = ()
    measurable: bool = True
