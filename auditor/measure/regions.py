"""Flagged nodes that lie together, run low together: does a region do more harm than its nodes explain?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from ..criteria.measure import for_outputs
from ..errors import first_line
from ..execution.execute import Executor, Run, SomeLow
from ..execution.held import kept as whole_run
from ..numerics.casting import raised
from ..numerics.metrics import output_error
from ..numerics.nodes import tensors_of, viewed
from ..pulse import beat
from ..raised import let_through
from ..records import Batch, Capture, Contribution, Distance, FlaggedRegion, Verdict
from .calibrate import Calibration
from .rounded import rounder

MAX_REGIONS = 4
"""Regions run per format, those first that take most of the budget; each costs a forward."""

Verdicts = Mapping[str, Mapping[str, Verdict]]


def run_regions(
    capture: Capture,
    model: torch.nn.Module,
    batch: Batch,
    found: Calibration,
    verdicts: Verdicts,
    formats: Sequence[str],
    distance: Distance = output_error,
) -> tuple[FlaggedRegion, ...]:
    """Each region of two nodes or more, low on reference inputs, and the rest of the model run on its results in FP32.

    Where the batches take several paths through the model, those on each.
    """
    if capture.paths:
        return tuple(_over_paths(capture, model, found, verdicts, formats, distance))
    regions = [region for fmt in formats for region in _chosen(capture, found, verdicts, fmt)]
    if not regions:
        return ()
    flat = [value.detach() if isinstance(value, torch.Tensor) else value for value in capture.bind(model, batch)]
    with torch.no_grad():
        try:
            reference = whole_run(capture, flat)
        except Exception as error:
            let_through(error)
            return tuple(_failed(region, capture, error) for region in regions)
        tested = tuple(_tested(region, capture, flat, reference, distance) for region in regions)
    del reference
    return tested


def _over_paths(
    capture: Capture,
    model: torch.nn.Module,
    found: Calibration,
    verdicts: Verdicts,
    formats: Sequence[str],
    distance: Distance,
) -> Iterator[FlaggedRegion]:
    known = set[tuple[str, ...]]()
    for path in capture.paths:
        by = distance if path.capture is capture.first else for_outputs(distance, path.outputs)
        for region in run_regions(path.capture, model, path.batches[0], found, verdicts, formats, by):
            names = tuple(capture.twins.get(name, name) for name in region.nodes)
            if (key := (region.format, *names)) not in known:
                known.add(key)
                yield replace(region, nodes=names)


@dataclass(frozen=True)
class _Region:
    fmt: str
    nodes: tuple[fx.Node, ...]
    explained: float

    @property
    def leaving(self) -> tuple[fx.Node, ...]:
        """Nodes whose results are read outside."""
        inside = set(self.nodes)
        return tuple(node for node in self.nodes if any(user not in inside for user in node.users))


def _chosen(capture: Capture, found: Calibration, verdicts: Verdicts, fmt: str) -> list[_Region]:
    flagged = {
        name
        for name, errors in found.errors.items()
        if verdicts[name][fmt].verdict in ("sensitive", "unsafe") and errors[fmt].unsupported is None
    }
    regions = [
        _Region(fmt, nodes, _explained(nodes, found.contributions, fmt)) for nodes in _connected(capture, flagged)
    ]
    return sorted(regions, key=lambda region: -region.explained)[:MAX_REGIONS]


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


def _explained(nodes: Sequence[fx.Node], contributions: Mapping[str, Mapping[str, Contribution]], fmt: str) -> float:
    """What first-order answers add up to in quadrature: each node's own error, and the rounding of what enters."""
    inside = set(nodes)
    entering = {source for node in nodes for source in node.all_input_nodes} - inside
    own = [contributions[node.name][fmt].own for node in nodes if node.name in contributions]
    cast = [contributions[node.name][fmt].cast for node in entering if node.name in contributions]
    return math.hypot(*own, *cast)


def _failed(region: _Region, capture: Capture, error: Exception) -> FlaggedRegion:
    names, reason = _names(region, capture), first_line(error)
    return FlaggedRegion(region.fmt, names, _shared(capture, names), None, None, region.explained, reason)


def _names(region: _Region, capture: Capture) -> tuple[str, ...]:
    return tuple(node.name for node in region.nodes if node.name in capture.nodes)


def _tested(region: _Region, capture: Capture, flat: list[Any], reference: Run, distance: Distance) -> FlaggedRegion:
    names = _names(region, capture)
    ends = [node for name in capture.outputs for node in capture.graph_module.graph.nodes if node.name == name]
    wanted, low = {*ends, *region.leaving}, dict[fx.Node, list[torch.Tensor]]()

    def keep(n: fx.Node, result: Any) -> None:
        if n in wanted:
            low[n] = tensors_of(raised(result))

    beat()
    inside = {node.name for node in region.nodes}
    try:
        policy = SomeLow(capture, inside, region.fmt, rounder(capture, region.fmt))
        Executor(capture.graph_module, policy, keep, reference).run(*flat)
    except Exception as error:
        let_through(error)
        return _failed(region, capture, error)
    outputs = [leaf for node in ends for leaf in _exact(reference, node)]
    changed = [leaf for node in ends for leaf in low.get(node) or _exact(reference, node)]
    local = max(_error(_exact(reference, node), low[node]) for node in region.leaving)
    return FlaggedRegion(
        region.fmt, names, _shared(capture, names), local, _error(outputs, changed, distance), region.explained, None
    )


def _exact(reference: Run, node: fx.Node) -> list[torch.Tensor]:
    return tensors_of(raised(reference.values[node.name]))


def _error(reference: list[torch.Tensor], candidate: list[torch.Tensor], distance: Distance = output_error) -> float:
    if [x.shape for x in reference] != [x.shape for x in candidate]:
        return math.inf
    return distance(reference, candidate)


def _shared(capture: Capture, names: Sequence[str]) -> str:
    """The deepest module that holds all of them."""
    paths = [capture.nodes[name].owner.split(".") for name in names]
    shared = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return ".".join(shared)
