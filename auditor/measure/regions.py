"""Operations that move the outputs and read each other, low together: do they do more harm than they explain one by one?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import networkx as nx
from torch import fx

from ..numerics.nodes import viewed
from ..records import Capture, Contribution, FlaggedRegion, Verdict
from .measure import Measurement
from .rerun import SENSITIVE_SHARE, Reruns, Yardstick

MAX_REGIONS = 4
"""Regions run per format, those first that take most of the budget; each costs a forward."""

Contributions = Mapping[str, Mapping[str, Contribution]]


def regions_of(measured: Measurement, found: Contributions, yardstick: Yardstick) -> Iterator[FlaggedRegion]:
    """Each region of two operations or more, low on reference inputs, and the rest of the model on its results in FP32."""
    for fmt in measured.formats:
        known = {name: by_format[fmt] for name, by_format in found.items()}
        flagged = {
            name
            for name, errors in measured.errors.items()
            if not known[name].isolated <= SENSITIVE_SHARE * yardstick.limit and errors[fmt].unsupported is None
        }
        reruns = Reruns(measured, fmt, yardstick)
        ranked = [(_explained(nodes, known), nodes) for nodes in _connected(measured.capture, flagged)]
        for explained, nodes in sorted(ranked, key=lambda pair: -pair[0])[:MAX_REGIONS]:
            names = tuple(node.name for node in nodes if node.name in measured.capture.nodes)
            local, error, failure = reruns.region([node.name for node in nodes])
            yield FlaggedRegion(fmt, names, _shared(measured.capture, names), local, error, explained, failure)


def of_verdicts(
    regions: Iterable[FlaggedRegion], capture: Capture, verdicts: Mapping[str, Mapping[str, Verdict]]
) -> tuple[FlaggedRegion, ...]:
    """Those with two operations or more that are judged to do harm, by the capture's names; of several paths each once."""
    found = dict[tuple[str, tuple[str, ...]], FlaggedRegion]()
    for region in regions:
        names = tuple(capture.twins.get(name, name) for name in region.nodes)
        harmful = [name for name in names if verdicts[name][region.format].verdict in ("sensitive", "unsafe")]
        if len(harmful) > 1:
            found.setdefault((region.format, names), replace(region, nodes=names))
    return tuple(found.values())


def _connected(capture: Capture, flagged: set[str]) -> Iterator[tuple[fx.Node, ...]]:
    """Sets of two flagged nodes or more that read each other, with the views between them, in execution order."""
    nodes = list(capture.graph_module.graph.nodes)
    together = nx.Graph()
    for node in nodes:
        if node.name not in flagged:
            continue
        for source in node.all_input_nodes:
            path = [node, source]
            while path[-1].name not in flagged and (earlier := viewed(path[-1])) is not None:
                path.append(earlier)
            if path[-1].name in flagged:
                nx.add_path(together, path)
    for members in nx.connected_components(together):
        yield tuple(node for node in nodes if node in members)


def _explained(nodes: Sequence[fx.Node], known: Mapping[str, Contribution]) -> float:
    """What first-order answers add up to in quadrature: each node's own error, and the rounding of what enters."""
    inside = set(nodes)
    entering = {source for node in nodes for source in node.all_input_nodes} - inside
    own = [known[node.name].own for node in nodes if node.name in known]
    cast = [known[node.name].cast for node in entering if node.name in known]
    return math.hypot(*own, *cast)


def _shared(capture: Capture, names: Sequence[str]) -> str:
    """The deepest module that holds all of them."""
    shared = []
    for steps in zip(*(capture.nodes[name].owner.split(".") for name in names), strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return ".".join(shared)
