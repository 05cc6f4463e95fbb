"""Runs of additions to one value: how long they are, and what each format loses in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from ..formats.table import FORMATS, narrower
from ..ops.nodes import row_of
from ..records import Capture, Magnitudes
from .values import nearest_range, spacing


@dataclass(frozen=True)
class Run:
    """Additions to one value. lost: {format: sum of the largest magnitudes of the updates too small for it}; absorbed: see NodeFacts."""

    length: int = 0
    lost: Mapping[str, float] = field(default_factory=dict)
    absorbed: Mapping[str, float | None] = field(default_factory=dict)


def additions(capture: Capture, ranges: Mapping[str, Magnitudes]) -> dict[fx.Node, Run]:
    """The run of additions that ends at each node, none elsewhere: in `h + f(h)` it is that of h."""
    runs: dict[fx.Node, Run] = {}
    for node in capture.graph_module.graph.nodes:
        longest = max((runs[item] for item in node.all_input_nodes), key=lambda run: run.length, default=Run())
        runs[node] = _longer(longest, node, ranges) if _adds(node) else longest if _carries(node) else Run()
    goes_on: dict[fx.Node, bool] = {}
    for node in reversed(capture.graph_module.graph.nodes):
        goes_on[node] = any(_adds(user) or (_carries(user) and goes_on[user]) for user in node.users)
    return {node: run if _adds(node) and not goes_on[node] else Run() for node, run in runs.items()}


def _longer(run: Run, node: fx.Node, ranges: Mapping[str, Magnitudes]) -> Run:
    """The run and one more addition. Of its two terms the larger is the value, the smaller the update."""
    found = [nearest_range(item, ranges) for item in node.all_input_nodes]
    known = sorted(item.max_abs for item in found if item)
    if len(known) < 2:
        return Run(run.length + 1, run.lost)
    update, value = known
    lost, absorbed = {}, {}
    for name in narrower():
        apart = spacing(value, FORMATS[name])
        vanishes = apart is not None and update <= apart / 2
        lost[name] = run.lost.get(name, 0.0) + (update if vanishes else 0.0)
        absorbed[name] = lost[name] / apart if apart else 0.0
    return Run(run.length + 1, lost, absorbed)


def _adds(node: fx.Node) -> bool:
    return row_of(node).packet == "add" and len(node.all_input_nodes) == 2


def _carries(node: fx.Node) -> bool:
    """Whether the node holds its input's values, perhaps scaled by a literal."""
    row = row_of(node)
    return (row.scales and len(node.all_input_nodes) == 1) or row.transparent
