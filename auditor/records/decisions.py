"""Records of discrete decisions inside a model (a router's choice, a threshold), and how low precision flips them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class Decision:
    """The decisions of one operation, and how many of them flip with the whole model in low precision."""

    node: Annotated[str, FileField("the operation, by name in the captured graph")]
    op: Annotated[str, FileField("ATen overload, for example `aten.topk.default`")]
    owner: Annotated[str, FileField("module that contains the operation")]
    source: Annotated[str | None, FileField("source line as `file:line`; `null`: unknown")]
    count: Annotated[int, FileField("number of decisions on the first batch", least=0)]
    seen: Annotated[
        float | None,
        FileField("share of flips with the whole model in low precision; `null`: not counted", least=0, most=1),
    ]
    predicted: Annotated[float | None, FileField("first-order prediction of `own`; `null`: unknown", least=0, most=1)]
    own: Annotated[
        float | None,
        FileField("share of flips if all other decisions are FP32's; `null`: not counted", least=0, most=1),
    ]
    error: Annotated[float | None, FileField("output error if only these decisions may flip; `null`: not run")] = None


@dataclass(frozen=True)
class Decisions:
    """Output error with the whole model in one format, and the error if all decisions are those of the FP32 run."""

    format: Annotated[str, FileField("the number format")]
    error: Annotated[float, FileField("error of the outputs with the whole model in low precision")]
    frozen: Annotated[float, FileField("`error` with all decisions of the FP32 run: the part that no flip causes")]
    operations: Annotated[tuple[Decision, ...], FileField("operations that decide, the largest `error` first")]
    lifted: Annotated[
        str | None, FileField("module that computes the scores of `operations[0]`; `null`: flips add no error")
    ] = None
    lifted_seen: Annotated[
        float, FileField("share of flips of `operations[0]` with the module `lifted` in FP32", least=0, most=1)
    ] = 0.0
    lifted_error: Annotated[float, FileField("`error` with the module `lifted` in FP32")] = 0.0

    @property
    def share(self) -> float:
        """Share of the squared error that flipped decisions cause, if flips and rounding are independent."""
        return max(0.0, 1 - (self.frozen / self.error) ** 2) if 0 < self.error < math.inf else 0.0
