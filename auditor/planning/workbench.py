"""What plans and baselines are made from, and the batches they are tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..measurement.calibrate import usable
from ..outputs import forward
from ..records import Batch, Capture, Contribution, Finding, Subject, Verdict
from .choose import Distance, Trial
from .costs import Cost
from .problem import Problem

Outputs = list[list[torch.Tensor]]


@dataclass(frozen=True)
class Workbench:
    """What plans are made from. contributions, verdicts: {format: {node: ...}}. native: a GPU runs the formats."""

    subject: Subject
    capture: Capture
    costs: Mapping[str, Cost]
    contributions: Mapping[str, Mapping[str, Contribution]]
    verdicts: Mapping[str, Mapping[str, Verdict]]
    findings: Sequence[Finding]
    distance: Distance
    max_error: float
    seed: int
    target: str
    native: bool

    @property
    def device(self) -> str:
        """Device of the verification runs."""
        return "cuda" if self.native else "cpu"

    @property
    def checks(self) -> tuple[Batch, ...]:
        """What patched models are run on: held-out inputs where there are any."""
        return self.subject.held_out or self.subject.batches

    def trial(self, batches: Sequence[Batch]) -> Trial:
        """Some batches that the captured graph is valid for, and their FP32 outputs."""
        references = [reference(self.subject, batch) for batch in batches]
        return Trial(self.capture, self.subject.model, tuple(batches), tuple(references), self.distance)

    def usable(self, batches: Sequence[Batch]) -> list[Batch]:
        """Those of some batches that the captured graph is valid for."""
        return usable(self.capture, self.subject, batches)

    def problem(self, strategy: str, fmt: str) -> Problem:
        """What a plan under one strategy and format is solved from."""
        return Problem(
            self.capture, self.costs, self.contributions[fmt], self.verdicts[fmt], strategy, fmt, self.target
        )


def reference(subject: Subject, batch: Batch) -> list[torch.Tensor]:
    """FP32 outputs of the model as it is."""
    with torch.no_grad():
        return [output.detach() for output in forward(subject.model, batch)]
