"""Runs the model again with some operations in low precision, if first-order estimates are insufficient."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import networkx as nx
import torch
from torch import fx

from ..criteria.measure import Criteria
from ..errors import describe, first_line, let_through
from ..execution.execute import RECORDED, Executor, Replay, Semantics, SubsetLowPrecision
from ..numerics.casting import widen
from ..numerics.entries import extent, is_number
from ..numerics.metrics import output_error
from ..numerics.nodes import row_of, tensors_in, view_source
from ..records import Capture, Contribution, Distance, FlaggedRegion, Verdict
from ..stages import beat
from .alone import rounder
from .measure import Measurement

LONGEST = 160
"""Maximum number of characters of an exception's message in a reason."""

SENSITIVE_SHARE = 0.25
"""Share of the error budget up to which one operation, or several together, count as harmless."""

MAX_REGIONS = 4
"""Maximum number of regions run per format, largest predicted error first; each run costs a forward pass."""


@dataclass(frozen=True)
class OutputMetric:
    """The error budget and the error measure. unit: the measure's value for a relative L2 error of 1."""

    budget: float = 0.0
    distance: Distance = output_error
    unit: float = 1.0

    @property
    def criteria(self) -> tuple[str, ...]:
        """The user's criteria as text; empty if the error has one unit."""
        return tuple(map(str, self.distance.all())) if isinstance(self.distance, Criteria) else ()

    @property
    def limit(self) -> float:
        """The error budget as a relative L2 error."""
        return self.budget / self.unit

    def __call__(self, reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> tuple[float, str]:
        """Return the outputs' error divided by `unit` (inf if not finite), and the criterion with the largest share of
        its limit ("" without criteria).

        Decisions are measured by the change of their margins, since the number of flips in one run is random.
        """
        relative = output_error(reference, candidate)
        if isinstance(self.distance, Criteria):
            results = self.distance.evaluate(reference, candidate, expected=True)
            most = max(results, key=lambda one: one.share, default=None)
            share, criterion = (most.share, str(most.criterion)) if most is not None else (0.0, "")
            return (share if math.isfinite(relative) else relative), criterion
        if self.distance is output_error or not math.isfinite(relative):
            return relative, ""
        return float(self.distance(reference, candidate)) / self.unit, ""

    @property
    def contribution_metric(self) -> Distance:
        """The error measure of contributions: shares of the criteria's limits; without criteria, relative L2."""
        return self.distance if isinstance(self.distance, Criteria) else output_error


PLAIN = OutputMetric()
"""An OutputMetric by which any change of the outputs is harmful: relative L2 error with budget 0."""


class Reruns:
    """Runs of a measured model with some operations in one low-precision format; only nodes that the change reaches are
    computed.

    criterion: the criterion with the largest share of its limit in the last run, if any. failure: the exception that the
    last run raised, in words, if any. outputs: of the last run; None if it raised an exception.
    """

    outputs: list[torch.Tensor] | None = None

    def __init__(self, measurement: Measurement, format: str, output_metric: OutputMetric) -> None:
        self.measurement, self.format, self.output_metric = measurement, format, output_metric
        self._round = rounder(measurement.capture, format)
        self._outputs = [x.detach() for x in measurement.outputs]
        self._reference, self._operations = Replay(measurement.values), 0
        self.criterion = self.failure = ""

    @property
    def spent(self) -> float:
        """Cost so far in runs of the whole model: operations run, divided by the model's operations."""
        return self._operations / max(len(self.measurement.errors), 1)

    def error(self, name: str, value: Any) -> float:
        """Output error if a node's result is replaced; inf if a finite output becomes non-finite."""
        readers = frozenset(user.name for user in self.measurement.nodes[name].users)
        values = ChainMap({name: value}, self._reference.values)  # type: ignore[arg-type]
        return self._error(RECORDED, Replay(values, stale=readers))[0]

    def together(self, names: Collection[str]) -> tuple[float, bool]:
        """Output error with all operations in `names` in low precision, and whether any discrete result changed."""
        return self._error(self._low(names), self._reference)

    def region(self, names: Collection[str]) -> tuple[float | None, float | None, str | None]:
        """Run the operations `names` in low precision. Return the largest error of results that other operations read,
        and the outputs' error; or the reason why the run failed."""
        low, values = self._low(names), self._reference.values
        try:
            outputs, _ = self._run(low, self._reference)
            left = [output_error(tensors_in(values[n.name]), tensors_in(result)) for n, result in low.left.items()]
            return max(left), self.output_metric.contribution_metric(self._outputs, outputs), None
        except Exception as error:
            let_through(error)
            return None, None, first_line(error)

    def _low(self, names: Collection[str]) -> SubsetLowPrecision:
        return SubsetLowPrecision(self.measurement.capture, set(names), self.format, self._round)

    def _error(self, semantics: Semantics, before: Replay) -> tuple[float, bool]:
        self.criterion = self.failure = ""
        self.outputs = None
        try:
            outputs, flipped = self._run(semantics, before)
            error, self.criterion = self.output_metric(self._outputs, outputs)
            self.outputs = outputs
            return error, flipped
        except Exception as error:  # later operations may not run: shapes or entries do not fit
            let_through(error)
            self.failure = describe(error, LONGEST)
            return math.inf, True

    def _run(self, semantics: Semantics, before: Replay) -> tuple[list[torch.Tensor], bool]:
        """Run the graph under `semantics`. Return the output tensors, and whether a discrete result changed."""
        beat()
        executor = Executor(self.measurement.capture.graph_module, semantics, before=before)
        result, flipped = None, False
        with torch.no_grad():
            for n, result in executor.steps(*self.measurement.flat_inputs):
                if n.op == "call_function":
                    self._operations += 1
                    flipped = flipped or chooses_otherwise(n, widen(result), self.measurement.values)
        return tensors_in(widen(result)), flipped


def chooses_otherwise(n: fx.Node, result: Any, values: Mapping[str, Any]) -> bool:
    """Whether a discontinuous result (index, mask, rounding to integers) differs from the node's in `values`."""
    row = row_of(n)
    tensors = tensors_in(result)
    if row.asks_shape or row.asks_finite:
        return False
    if not row.steps and all(map(is_number, tensors)):
        return False
    for x, y in zip(tensors, tensors_in(values[n.name]), strict=False):
        is_discontinuous = row.steps or not is_number(y)
        if is_discontinuous and (extent(x) != extent(y) or bool((x != y).any())):
            return True
    return False


def regions_of(
    measured: Measurement, contributions: Mapping[str, Mapping[str, Contribution]], output_metric: OutputMetric
) -> Iterator[FlaggedRegion]:
    """Run each region (connected operations that change the outputs noticeably) in low precision, all else in FP32.
    Yields the region's joint effect and, to compare it with, the root sum of squares of its operations' own effects."""
    nodes = measured.capture.nodes
    limit = SENSITIVE_SHARE * output_metric.limit
    for fmt in measured.formats:
        effects = {name: by_format[fmt] for name, by_format in contributions.items()}
        flagged = set[str]()
        for name, errors in measured.errors.items():
            if not effects[name].isolated <= limit and errors[fmt].unsupported is None:
                flagged.add(name)
        reruns = Reruns(measured, fmt, output_metric)
        ranked = list[tuple[float, tuple[fx.Node, ...]]]()  # (root sum of squares, region)
        for region in _flagged_components(measured.capture, flagged):
            ranked.append((_sum_of_effects(region, effects), region))
        ranked.sort(key=lambda pair: -pair[0])
        for explained, region in ranked[:MAX_REGIONS]:
            names = tuple(node.name for node in region if node.name in nodes)
            local, error, failure = reruns.region([node.name for node in region])
            around = _innermost(nodes[name].owner for name in names)
            yield FlaggedRegion(fmt, names, around, local, error, explained, failure)


def _sum_of_effects(region: Sequence[fx.Node], effects: Mapping[str, Contribution]) -> float:
    """The root sum of squares of the own effects in a region, and of the casts of the values that enter it."""
    entering = {source for node in region for source in node.all_input_nodes} - set(region)
    own = [effects[node.name].own for node in region if node.name in effects]
    cast = [effects[node.name].cast for node in entering if node.name in effects]
    return math.hypot(*own, *cast)


def _innermost(modules: Iterable[str]) -> str:
    """The path of the innermost module that contains all modules of these paths; "" is the root."""
    parts = [path.split(".") for path in modules]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in shared)


def of_verdicts(
    regions: Iterable[FlaggedRegion], capture: Capture, verdicts: Mapping[str, Mapping[str, Verdict]]
) -> tuple[FlaggedRegion, ...]:
    """The regions with two or more sensitive or unsafe operations.

    A region that several recorded graphs of the model contain is returned once, with the names of nodes in the first of them.
    """
    result = dict[tuple[str, tuple[str, ...]], FlaggedRegion]()
    for region in regions:
        names = tuple(capture.twins.get(name, name) for name in region.nodes)
        harmful = [name for name in names if verdicts[name][region.format].verdict in ("sensitive", "unsafe")]
        if len(harmful) > 1:
            result.setdefault((region.format, names), replace(region, nodes=names))
    return tuple(result.values())


def _flagged_components(capture: Capture, flagged: set[str]) -> Iterator[tuple[fx.Node, ...]]:
    """Sets of two or more connected flagged nodes, including views between them, in execution order."""
    nodes = list(capture.graph_module.graph.nodes)
    together = nx.Graph()
    for node in nodes:
        for source in node.all_input_nodes if node.name in flagged else ():
            path = [node, source]
            while path[-1].name not in flagged and (earlier := view_source(path[-1])) is not None:
                path.append(earlier)
            if path[-1].name in flagged:
                nx.add_path(together, path)
    for members in nx.connected_components(together):
        yield tuple(node for node in nodes if node in members)
