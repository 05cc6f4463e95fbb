"""What Python would write in a format that torch has no dtype for, read off a run in one that it has."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..numerics.formats import FORMATS, Format
from ..records import Literals

_FP16 = FORMATS["fp16"]


def stand_in(row: Format) -> Format:
    """The format in which a model is recorded for this one: itself, or FP16, whose limits are all unlike FP32's."""
    return row if row.native else _FP16


def translated(found: Literals, row: Format) -> Literals:
    """Literals of a run in the stand-in, as the format would have them.

    Its dtype becomes the format, and limits of FP16 those of the format. Other values stay as the FP32 model has them.
    """
    if row.native:
        return found
    arguments = {key: _translated(value, row) for key, value in found.arguments.items()}
    result = found.result if found.result is None else _translated(found.result, row)
    return Literals({key: value for key, value in arguments.items() if value is not None}, result)


def _translated(value: Any, row: Format) -> Any:
    if isinstance(value, torch.dtype):
        return row if value is _FP16.dtype else value
    limits = zip(_limits(_FP16), _limits(row), strict=True)
    return next((math.copysign(theirs, value) for ours, theirs in limits if abs(value) == ours), None)


def _limits(row: Format) -> tuple[float, ...]:
    """What `torch.finfo` says of a format: max, tiny, eps, resolution, and 1 - eps, which models clamp by."""
    resolution = 10.0 ** -math.floor(row.mantissa * math.log10(2))
    return row.largest, row.smallest_normal, row.epsilon, resolution, 1 - row.epsilon
