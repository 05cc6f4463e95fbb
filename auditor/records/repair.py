"""The record of what a model gains if one problem in its source is repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class Repair:
    """The fastest plan that is predicted if the operations of one or several causes are repaired in the model's source.

    A repaired operation computes in FP32 on low-precision inputs and returns a low-precision result without an error.
    """

    causes: Annotated[tuple[str, ...], FileField("causes of the findings that are repaired, as in `findings.cause`")]
    plan: Annotated[str, FileField("name of the plan that is then predicted to be fastest, such as `cast_fp16`")]
    speedup: Annotated[float, FileField("predicted speed-up of that plan over FP32", least=0)]
    before: Annotated[float, FileField("predicted speed-up of the recommended plan; 1 without one", least=0)]
    kept: Annotated[int, FileField("modules and functions that this plan still keeps in FP32", least=0)]

    @property
    def gain(self) -> float:
        """Predicted time of the recommended plan as a multiple of the time after the repair."""
        return self.speedup / self.before if self.before else 1.0
