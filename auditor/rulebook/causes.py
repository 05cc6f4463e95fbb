"""Root causes: which findings come of one another, and at which line that begins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from ..measure.calibrate import Calibration
from ..measure.causes import breaks
from ..numerics.operations import operation
from ..paths import place
from ..records import Finding, Node, Verdict
from .rule import Rule

Verdicts = Mapping[str, Mapping[str, Verdict]]
APART = ("hardware", "collectives", "settings")
"""Families of rules about how fast or where a model runs: what they find has no share in an error on the same line."""
FLAGGED = ("sensitive", "unsafe")
AMPLIFIED = 8.0
"""How many times as far errors of an operation's inputs move the outputs as that of its result, where it amplifies them."""

WEIGHTY = 0.25
"""Share of the largest effect of what lies together, from which an operation may have to do with all of it."""


@dataclass(frozen=True)
class Graph:
    """The nodes of a capture in the order they run, with what was measured and judged of them."""

    nodes: Mapping[str, Node]
    measured: Calibration
    verdicts: Verdicts

    def broken(self, name: str, fmt: str) -> bool:
        """Whether the node alone, low, refuses, or makes something non-finite that is finite in FP32."""
        error = self.measured.errors.get(name, {}).get(fmt)
        contribution = self.measured.contributions.get(name, {}).get(fmt)
        return error is not None and breaks(error, contribution)

    def flagged(self, name: str, fmt: str) -> bool:
        """Whether it is sensitive or unsafe."""
        verdict = self.verdicts.get(name, {}).get(fmt)
        return verdict is not None and verdict.verdict in FLAGGED

    def effect(self, name: str, fmt: str) -> float:
        """How far it moves the outputs alone."""
        contribution = self.measured.contributions.get(name, {}).get(fmt)
        return contribution.isolated if contribution is not None else 0.0

    def amplifies(self, name: str, fmt: str) -> bool:
        """Whether errors of its inputs do far more harm than one of its result, as at a softmax of large entries."""
        contribution = self.measured.contributions.get(name, {}).get(fmt)
        if contribution is None or not math.isfinite(contribution.isolated):
            return False
        result = max(contribution.own, contribution.cast)
        return 0 < AMPLIFIED * result < contribution.isolated


def with_causes(findings: Sequence[Finding], graph: Graph, rules: Sequence[Rule]) -> tuple[Finding, ...]:
    """The findings, each with the line and operation at which what it reports begins; equal ones have one cause.

    Blocks that repeat run the same line. What an operation makes non-finite is the cause of what its readers make of it.
    What the measurement alone reports, and is not that, goes to the nearest finding of a rule about precision that the
    measurement bears out, over operations that are all sensitive or unsafe; where there is none, what lies together, or
    on a line with it, is one cause.
    """
    families = {rule.code: rule.family for rule in rules}
    formats = tuple(dict.fromkeys(fmt for finding in findings for fmt in finding.formats))
    begins = {fmt: _beginnings(graph, fmt) for fmt in formats}
    unforeseen = {id(f) for f in findings if families.get(f.rule) == "measured" and not _breaks(graph, f)}
    placed = {id(f): _place(graph, f, begins, families) for f in findings if id(f) not in unforeseen}
    foreseen = [f for f in findings if f.agrees and f.severity != "info" and f.measurable and not _breaks(graph, f)]
    foreseen = [finding for finding in foreseen if id(finding) not in unforeseen]
    placed |= _gathered(graph, findings, foreseen, placed, formats)
    return tuple(replace(finding, cause=placed[id(finding)]) for finding in findings)


def _beginnings(graph: Graph, fmt: str) -> dict[str, str]:
    """{broken node: the one it has that from, through inputs that are broken too}; what refuses has it from nobody."""
    found: dict[str, str] = {}
    for name, node in graph.nodes.items():
        if not graph.broken(name, fmt):
            continue
        above = (
            None if graph.measured.errors[name][fmt].unsupported else next((i for i in node.inputs if i in found), None)
        )
        found[name] = name if above is None else found[above]
    return found


def _breaks(graph: Graph, finding: Finding) -> bool:
    return any(graph.broken(finding.node, fmt) for fmt in finding.formats)


def _place(graph: Graph, finding: Finding, begins: Mapping[str, Mapping[str, str]], families: Mapping[str, str]) -> str:
    if finding.node not in graph.nodes:
        return finding.source or finding.op
    if families.get(finding.rule) in APART:
        return f"{place_of(graph.nodes[finding.node])}: {finding.rule}"
    origins = (begins[fmt].get(finding.node) for fmt in finding.formats)
    return place_of(graph.nodes[next(filter(None, origins), finding.node)])


def place_of(node: Node) -> str:
    """The line and operation of a node: see `place`."""
    return place(node.source, node.owner, node.op)


def _gathered(
    graph: Graph,
    findings: Sequence[Finding],
    foreseen: Sequence[Finding],
    placed: Mapping[int, str],
    formats: Iterable[str],
) -> dict[int, str]:
    """Causes of findings that are not placed yet: those of the measurement alone, about precision."""
    found: dict[int, str] = {}
    rest = [finding for finding in findings if id(finding) not in placed]
    together = nx.Graph()
    for fmt in formats:
        stretch = _stretches(graph, fmt)
        nearest = _nearest(stretch, {f.node: placed[id(f)] for f in foreseen if f.node in stretch})
        for finding in rest:
            if fmt in finding.formats and finding.node in nearest:
                found[id(finding)] = nearest[finding.node]
        for number, nodes in enumerate(nx.connected_components(stretch)):
            together.add_edges_from(((fmt, number), place_of(graph.nodes[name])) for name in nodes)
    left = [finding for finding in rest if id(finding) not in found]
    broken = {placed[id(f)] for f in findings if id(f) in placed and _breaks(graph, f)}
    return found | _headed(graph, left, together, broken)


def _stretches(graph: Graph, fmt: str) -> nx.Graph:
    """The flagged nodes of a format, joined where one reads the other."""
    flagged = [name for name in graph.nodes if graph.flagged(name, fmt)]
    found = nx.Graph()
    found.add_nodes_from(flagged)
    found.add_edges_from((source, name) for name in flagged for source in graph.nodes[name].inputs if source in found)
    return found


def _nearest(stretch: nx.Graph, causes: Mapping[str, str]) -> dict[str, str]:
    """{node: the cause of the nearest node that has one}; in a tie, of the one that runs first."""
    found, waiting = dict(causes), deque(causes)
    while waiting:
        name = waiting.popleft()
        for other in stretch[name]:
            if other not in found:
                found[other] = found[name]
                waiting.append(other)
    return found


def _headed(graph: Graph, left: Sequence[Finding], together: nx.Graph, broken: Container[str]) -> dict[int, str]:
    """What lies together goes by the place of one of its own operations: see `_head`.

    broken: places at which something turns non-finite, which is another matter.
    """
    joined: dict[str, int] = {}
    for number, members in enumerate(nx.connected_components(together)):
        joined |= {where: number for where in members if isinstance(where, str)}
    same: dict[object, list[Finding]] = {}
    for finding in left:
        where = place_of(graph.nodes[finding.node])
        same.setdefault(joined.get(where, where), []).append(finding)
    found: dict[int, str] = {}
    for findings in same.values():
        where = place_of(graph.nodes[_head(graph, findings)])
        found |= {id(finding): f"{where}: precision" if where in broken else where for finding in findings}
    return found


def _head(graph: Graph, findings: Sequence[Finding]) -> str:
    """The operation at which the errors that move the outputs begin: what makes the value that another amplifies.

    Ahead of one that amplifies all operations move the outputs alike, up to chance, however far up they are: none of their
    effects tells which it is. Where none amplifies, it is the one that moves the outputs most.
    """
    effects = {f.node: max(graph.effect(f.node, fmt) for fmt in f.formats) for f in findings}
    largest = max(effects.values())
    amplifiers = [
        f
        for f in findings
        if effects[f.node] >= WEIGHTY * largest and any(graph.amplifies(f.node, fmt) for fmt in f.formats)
    ]
    if not amplifiers:
        return max(effects, key=effects.__getitem__)
    worst = max(amplifiers, key=lambda finding: effects[finding.node])
    fmt = next(fmt for fmt in worst.formats if graph.amplifies(worst.node, fmt))
    return _maker(graph, worst.node, fmt, effects)


def _maker(graph: Graph, amplifier: str, fmt: str, among: Container[str]) -> str:
    """What makes the one inaccurate value that it reads, seen through what moves, masks or shifts; itself if it reads two.

    Of these the farthest up that there is a finding on.
    """
    name = found = amplifier
    while True:
        sources = [source for source in dict.fromkeys(graph.nodes[name].inputs) if graph.flagged(source, fmt)]
        if len(sources) != 1 or sources[0] not in graph.nodes:
            return found
        (name,) = sources
        found = name if name in among else found
        row = operation(graph.nodes[name].op)
        if not (row.transparent or row.exact or row.masks or row.sum):
            return found
