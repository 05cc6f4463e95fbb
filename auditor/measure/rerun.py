"""The model run again with some operations low, where first order does not tell what their errors do."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..criteria.measure import Criteria
from ..errors import first_line, let_through
from ..execution.rest import Rest
from ..numerics.metrics import output_error
from ..numerics.nodes import tensors_of
from ..records import Distance
from .alone import rounder
from .measure import Measurement

SENSITIVE_SHARE = 0.25
"""Share of the error budget up to which an operation, or many together, are held to do no harm."""


@dataclass(frozen=True)
class Yardstick:
    """The error budget, and the user's own measure of errors. unit: what that makes of one unit of relative L2 error."""

    budget: float = 0.0
    distance: Distance = output_error
    unit: float = 1.0

    @property
    def limit(self) -> float:
        """The budget as a relative L2 error."""
        return self.budget / self.unit

    def __call__(self, reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
        """How far outputs are off, such that `unit` times it is what the user's measure says; inf if not finite."""
        relative = output_error(reference, candidate)
        if self.distance is output_error or not math.isfinite(relative):
            return relative
        return float(self.distance(reference, candidate)) / self.unit

    @property
    def measured(self) -> Distance:
        """What contributions are in before `unit`: shares of criteria, where there are any, else relative L2."""
        return self.distance if isinstance(self.distance, Criteria) else output_error

    def criterion(self, reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> str:
        """The criterion of which outputs take most; "" where there is none."""
        if not isinstance(self.distance, Criteria):
            return ""
        most = max(self.distance.held(reference, candidate), key=lambda held: held.share, default=None)
        return str(most.criterion) if most is not None else ""


PLAIN = Yardstick()
"""Relative L2 error, and no budget: nothing that moves the outputs is harmless."""


class Reruns:
    """Re-runs of a measured model in one format; `spent` says how many whole runs they cost so far.

    criterion: the one that the last run took most of, where there are any.
    """

    def __init__(self, measurement: Measurement, format: str, yardstick: Yardstick) -> None:
        self.measurement, self.format, self.yardstick = measurement, format, yardstick
        self._round = rounder(measurement.capture, format)
        self.criterion = ""

    @cached_property
    def _rest(self) -> Rest:
        return Rest(self.measurement.capture, self.measurement.flat_inputs, self.measurement.values)

    @cached_property
    def _outputs(self) -> list[torch.Tensor]:
        return [x.detach() for x in self.measurement.outputs]

    @property
    def spent(self) -> float:
        """In runs of the whole model, by operations."""
        return self._rest.replays

    def error(self, name: str, value: Any) -> float:
        """Error of the outputs when a node's value is another; inf where a finite output turned non-finite."""
        try:
            return self._held(self._rest.outputs({name: value}))
        except Exception as error:  # what follows cannot be computed from it: its shape, or entries, do not fit
            let_through(error)
            self.criterion = ""
            return math.inf

    def together(self, names: Collection[str]) -> tuple[float, bool]:
        """The same with all these operations low at once, and whether a discrete result anywhere is another.

        Of more than one, a choice counts as another where one of them alone might make it so.
        """
        try:
            followed = self._rest.together(names, self.format, self._round, provoke=len(names) > 1)
            return self._held(followed.outputs), followed.flipped
        except Exception as error:
            let_through(error)
            self.criterion = ""
            return math.inf, True

    def region(self, names: Collection[str]) -> tuple[float | None, float | None, str | None]:
        """Error of the values that leave these operations when all are low, the worst one's, and of the outputs; or why they cannot run."""
        values = self.measurement.values
        try:
            followed = self._rest.together(names, self.format, self._round)
            left = [output_error(tensors_of(values[name]), tensors_of(low)) for name, low in followed.left.items()]
            return max(left), self.yardstick.measured(self._outputs, followed.outputs), None
        except Exception as error:
            let_through(error)
            return None, None, first_line(error)

    def _held(self, outputs: list[torch.Tensor]) -> float:
        self.criterion = self.yardstick.criterion(self._outputs, outputs)
        return self.yardstick(self._outputs, outputs)
