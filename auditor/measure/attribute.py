"""How much each node's error moves the model's outputs: to first order, or by running the rest of the model again."""

from __future__ import annotations

import math
from collections.abc import Callable

import networkx as nx
import torch
from torch import fx

from ..formats.metrics import output_error
from ..formats.table import FORMATS
from ..ops.casting import lowered, raised
from ..records import Contribution
from .estimates import estimate
from .measure import Measurement
from .rerun import chosen

MAX_RERUNS = 96


def attribute(
    measurement: Measurement, seed: int = 0, tick: Callable[[str], None] = lambda name: None
) -> dict[str, dict[str, Contribution]]:
    """{node or placeholder: {format: Contribution}}: relative L2 of the outputs, unit 1.

    Nodes without a first-order answer (non-finite, or deciding a discrete result) are re-run: that node low, all else
    FP32. See estimates.py for the others.
    """
    estimates = estimate(measurement, seed)
    result: dict[str, dict[str, Contribution]] = {}
    for name in measurement.live:
        result[name] = {fmt: estimates.contribution(name, fmt) for fmt in measurement.formats}
    replay = _Replay(measurement)
    for fmt in measurement.formats:
        for name in _undecided(measurement, fmt):
            tick(name)
            result[name][fmt] = _rerun(measurement, replay, name, fmt)
    return result


class _Replay:
    """The model's outputs with the value of one node replaced, all else FP32."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        graph = measurement.capture.graph_module.graph
        self.nodes = {node.name: node for node in graph.nodes}
        self.graph = nx.DiGraph((source.name, node.name) for node in graph.nodes for source in node.all_input_nodes)
        self.reference = [x.detach() for x in measurement.outputs]

    def error(self, name: str, value: object) -> float:
        """Error of the outputs against the reference; inf where a finite output turned non-finite."""
        changed = nx.descendants(self.graph, name) if name in self.graph else set()
        initial = {
            node: self.measurement.values[other]
            for other, node in self.nodes.items()
            if other not in changed and other in self.measurement.values
        }
        initial[self.nodes[name]] = value
        interpreter = fx.Interpreter(self.measurement.capture.graph_module, garbage_collect_values=False)
        try:
            with torch.no_grad():
                interpreter.run(*self.measurement.flat_inputs, initial_env=initial)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # what follows cannot be computed from this value: its shape, or its entries, do not fit
            return math.inf
        leaves = [interpreter.env[self.nodes[output]] for output in self.measurement.capture.outputs]
        return output_error(self.reference, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def _undecided(measurement: Measurement, fmt: str) -> list[str]:
    """Nodes for which no first-order answer exists, those certain to matter first, at most MAX_RERUNS."""
    found = {name: traces[fmt] for name, traces in measurement.traces.items() if traces[fmt].low is not None}
    return chosen(found, lambda name: found[name].certain, MAX_RERUNS)


def _rerun(measurement: Measurement, replay: _Replay, name: str, fmt: str) -> Contribution:
    isolated = replay.error(name, raised(measurement.traces[name][fmt].low))
    cast = isolated
    if measurement.capture.nodes[name].floating:
        cast = replay.error(name, raised(lowered(measurement.values[name], FORMATS[fmt])))
    return Contribution(isolated=isolated, own=isolated, cast=cast, decided_by="re-run")
