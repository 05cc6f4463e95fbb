"""Literals against the formats: which of them a format can not hold, loses, or takes for one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ..formats.rounding import round_to
from ..formats.table import FORMATS, narrower


def formats_where(holds: Callable[[float, str], bool], literals: tuple[float, ...]) -> tuple[str, ...]:
    """Names of the formats in which `holds(literal, format)` is true of some literal."""
    return tuple(name for name in narrower() if any(holds(literal, name) for literal in literals))


def beyond(literal: float, name: str) -> bool:
    """Whether rounding to the format leaves its range: to infinity, or, where it has none, down to its largest number."""
    return abs(_rounded(literal, name)) == float("inf") or (
        FORMATS[name].overflows_to == "largest" and abs(literal) > FORMATS[name].largest
    )


def lost(literal: float, name: str) -> bool:
    """Whether a literal other than zero is zero in the format."""
    return literal != 0 and _rounded(literal, name) == 0


def as_one(literal: float, name: str) -> bool:
    """Whether a literal other than one is one in the format."""
    return literal != 1 and _rounded(literal, name) == 1


@lru_cache(maxsize=4096)
def _rounded(literal: float, name: str) -> float:
    return float(round_to(torch.tensor(literal, dtype=torch.float32), name))
