"""Runs of the captured graph under a choice of precisions, and how far its outputs are then from those in FP32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..cache.kept import NO_RUNS
from ..cache.kept import Runs as KeptRuns
from ..cache.policy import told
from ..isolation.outputs import tensor_outputs
from ..pulse import beat
from ..ranks import shared
from ..records import Batch, Capture, Distance
from ..replay.again import PolicyAgain, Run, begun
from ..replay.execute import PolicyInterpreter
from ..replay.running import Running


@dataclass(eq=False)
class Begun:
    """What runs that differ in little take from the first of them. ahead: those that are known to follow, None where any may."""

    ahead: Sequence[Running] | None
    run: Run | None = None


@dataclass(frozen=True)
class Trial:
    """One model on some batches, its FP32 outputs, and the measure of distance that the budget speaks of.

    runs: of each batch what runs came to that were made before. beside: what runs on the first batch begin from. paths: of
    each batch the recorded path that it takes, where there are several.
    """

    capture: Capture
    model: nn.Module
    batches: Sequence[Batch]
    references: Sequence[Sequence[torch.Tensor]]
    distance: Distance
    runs: Sequence[KeptRuns] = ()
    beside: Begun | None = None
    paths: Sequence[Capture] = ()

    def near(self, ahead: Sequence[Running] | None = None) -> Trial:
        """The same, for runs that differ from one another in little: what the first one computed, the others do not compute
        again. ahead: those that will follow it, where only what they need is to be kept."""
        return replace(self, beside=Begun(ahead))

    def forget(self) -> None:
        """Give up what runs begin from: the next one is made from its start."""
        if self.beside is not None:
            self.beside.run = None

    def error(self, how: Running, enough: float = math.inf) -> float:
        """Distance of low runs of the graph from the references: the worst batch's, or the first beyond `enough`; NaN counts.

        Raises: UnsupportedInFormat where an operation refuses, or whatever else it raises.
        """
        key = told(self.capture, how) if any(self.runs) else None

        def beyond(error: float) -> bool:
            return not error <= enough

        found = shared("a low run", range(len(self.batches)), lambda i: self._error(i, how, key), enough=beyond)
        return found[-1] if beyond(found[-1]) else max(found)

    def _error(self, index: int, how: Running, key: str | None) -> float:
        runs = self.runs[index] if key is not None else NO_RUNS
        known = runs.get(key or "", float)
        if known is not None:
            return float(known[0])
        capture = self.paths[index] if self.paths else self.capture
        found = float(self.distance(self.references[index], self._run(capture, how, self.batches[index])))
        runs.put(key or "", [found])
        return found

    def _run(self, capture: Capture, how: Running, batch: Batch) -> list[torch.Tensor]:
        beat()
        inputs = capture.bind(self.model, batch)
        beside = self.beside if batch is self.batches[0] else None
        with torch.no_grad():
            if beside is None:
                result = PolicyInterpreter(capture, how).run(*inputs)
            elif beside.run is None:
                result, beside.run = begun(capture, inputs, how, beside.ahead)
            else:
                result = PolicyAgain(capture, how, beside.run).run(*inputs)
        return tensor_outputs(result)
