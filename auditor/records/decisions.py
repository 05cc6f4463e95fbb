"""What is decided inside a model (a router's choice, a threshold, a code), and what becomes of it in low precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class Decision:
    """What one operation decides, and what becomes of it where the whole model runs low."""

    node: Annotated[str, FileField("the operation, by name in the captured graph")]
    op: Annotated[str, FileField("ATen overload, for example `aten.topk.default`")]
    owner: Annotated[str, FileField("module it belongs to")]
    source: Annotated[str | None, FileField("line that wrote it")]
    count: Annotated[int, FileField("decisions on the first batch", least=0)]
    seen: Annotated[float | None, FileField("share of them that flips; `null`: not counted", least=0, most=1)]
    predicted: Annotated[float | None, FileField("what first order says of `own`; `null`: no margins", least=0, most=1)]
    own: Annotated[float | None, FileField("share that flips where others are held; `null`: likewise", least=0, most=1)]
    error: Annotated[float | None, FileField("of the outputs where these alone are not held; `null`: not run")] = None


@dataclass(frozen=True)
class Decisions:
    """The outputs' error where the whole model runs low in a format, taken apart: decisions that flip, and the rest."""

    format: Annotated[str, FileField("the number format")]
    error: Annotated[float, FileField("of the outputs, everything low, as the budget measures")]
    frozen: Annotated[float, FileField("the same with every decision held to FP32's: what is continuous")]
    operations: Annotated[tuple[Decision, ...], FileField("what decides, those whose flips cost most first")]
    lifted: Annotated[str | None, FileField("module that makes the first's scores; `null`: flips cost nothing")] = None
    lifted_seen: Annotated[float, FileField("share of the first's that flips with it in FP32", least=0, most=1)] = 0.0
    lifted_error: Annotated[float, FileField("`error` likewise")] = 0.0

    @property
    def share(self) -> float:
        """Share of the squared error that decisions make: squares of independent errors add up."""
        return max(0.0, 1 - (self.frozen / self.error) ** 2) if 0 < self.error < math.inf else 0.0
