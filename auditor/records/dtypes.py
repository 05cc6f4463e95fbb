"""What an operation is seen to read, compute in and give while the model runs under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import Written


@dataclass(frozen=True)
class Dtypes:
    """What one operation reads, computes in and gives when the model runs under a plan; dtypes as torch names them."""

    inputs: Annotated[
        tuple[str, ...],
        Written("dtypes of the tensors that it reads, as they reach it and before autocast casts them, each once"),
    ]
    computed: Annotated[
        str,
        Written("dtype that its kernel is handed: what autocast, promotion or a `dtype` argument make of its inputs"),
    ]
    output: Annotated[str, Written("dtype of its result, of the first of several")]
