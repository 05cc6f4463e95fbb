"""The record of a plan's error over the calls of a module that runs again and again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class RepeatedCalls:
    """The error under the recommended plan, call by call, of a part of the model that runs repeatedly."""

    kind: Annotated[
        str,
        FileField(
            "`calls`: of one module, such as a sampler's denoiser; `layers`: of equal modules in a list; `batches`: of "
            "the whole model",
            choices=("calls", "layers", "batches"),
        ),
    ]
    module: Annotated[str, FileField("path of the module, or of the list; empty for the root")]
    names: Annotated[tuple[str, ...], FileField("the calls, in order, in words, such as `call 1` or `layers.0`")]
    errors: Annotated[
        tuple[float | None, ...],
        FileField(
            "error of each call's results: relative L2; of a batch: in the unit of `max_error`; `null`: Inf or NaN"
        ),
    ]

    @property
    def worst(self) -> int:
        """Position of the call with the largest error; a call with Inf or NaN is the worst."""
        sizes = [math.inf if error is None else error for error in self.errors]
        return sizes.index(max(sizes))
