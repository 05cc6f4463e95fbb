"""Runs of the captured graph under a choice of precisions, and how far its outputs are then from those in FP32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..execution.execute import Executor, Run, Under
from ..execution.running import Running
from ..isolation.outputs import tensor_outputs
from ..pulse import beat
from ..records import Batch, Capture, Distance


@dataclass(frozen=True)
class Trial:
    """One model on some batches, its FP32 outputs, and the measure of distance that the budget speaks of.

    beside: the run that others on the first batch begin from, once there is one. paths: of each batch the recorded path
    that it takes, where there are several.
    """

    capture: Capture
    model: nn.Module
    batches: Sequence[Batch]
    references: Sequence[Sequence[torch.Tensor]]
    distance: Distance
    beside: list[Run] | None = None
    paths: Sequence[Capture] = ()

    def near(self) -> Trial:
        """The same, for runs that differ from one another in little: what the first one computed, the others do not compute
        again."""
        return replace(self, beside=[])

    def error(self, how: Running) -> float:
        """Distance of low runs of the graph from the references, the worst batch's; NaN counts.

        Raises: UnsupportedInFormat where an operation refuses, or whatever else it raises.
        """
        paths = self.paths or [self.capture] * len(self.batches)
        each = zip(paths, self.references, self.batches, strict=True)
        return worst_of([float(self.distance(expected, self._run(path, how, x))) for path, expected, x in each])

    def _run(self, capture: Capture, how: Running, batch: Batch) -> list[torch.Tensor]:
        beat()
        inputs = capture.bind(self.model, batch)
        beside = self.beside if batch is self.batches[0] else None
        policy, values = Under(capture, how), dict[str, Any]()
        before, result = beside[0] if beside else None, None
        with torch.no_grad():
            for n, result in Executor(capture.graph_module, policy, before=before).steps(*inputs):
                if beside is not None and before is None:
                    values[n.name] = result
        if beside is not None and before is None:
            beside.append(Run(values, policy))
        return tensor_outputs(result)


def worst_of(values: Sequence[float]) -> float:
    """The largest; NaN if any is, so that it fails every threshold. Nothing gives 0."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)
