"""Runs of the captured graph under a choice of precisions, and how far its outputs are then from those in FP32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from ..cache.kept import NO_RUNS
from ..cache.kept import Runs as KeptRuns
from ..cache.policy import told
from ..pulse import beat
from ..raised import let_through
from ..ranks import shared
from ..records import Batch, Capture, Distance
from ..replay.again import PolicyAgain, Run, kept
from ..replay.execute import PolicyInterpreter
from ..replay.running import Running
from ..runs.outputs import tensor_outputs


@dataclass(frozen=True)
class Trial:
    """One model on some batches, its FP32 outputs, and the measure of distance that the budget speaks of.

    runs: of each batch what runs came to that were made before. beside: what the runs differ from in little.
    """

    capture: Capture
    model: nn.Module
    batches: Sequence[Batch]
    references: Sequence[Sequence[torch.Tensor]]
    distance: Distance
    runs: Sequence[KeptRuns] = ()
    beside: Running | None = None

    def near(self, how: Running) -> Trial:
        """The same, for runs that differ from `how` in little; where that does not run itself, nothing is gained."""
        return replace(self, beside=how)

    def knows(self, how: Running) -> bool:
        """Whether a run is known without being made."""
        key = told(self.capture, how) if self.runs and all(self.runs) else None
        return key is not None and all(runs.get(key, float) is not None for runs in self.runs)

    @cached_property
    def _before(self) -> Run | None:
        if self.beside is None:
            return None
        try:
            with torch.no_grad():
                return kept(self.capture, self.capture.bind(self.model, self.batches[0]), self.beside)
        except Exception as error:
            let_through(error)
            return None

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
        found = float(self.distance(self.references[index], self._run(how, self.batches[index])))
        runs.put(key or "", [found])
        return found

    def _run(self, how: Running, batch: Batch) -> list[torch.Tensor]:
        beat()
        begun = self._before if batch is self.batches[0] else None
        interpreter = PolicyAgain(self.capture, how, begun) if begun else PolicyInterpreter(self.capture, how)
        with torch.no_grad():
            return tensor_outputs(interpreter.run(*self.capture.bind(self.model, batch)))
