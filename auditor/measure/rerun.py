"""Which operations are run again one by one, where first order does not tell what their errors do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What re-runs may cost, each being a run of the model. most: how many there are in a format.

    elements: of all results of one run together, up to which there are any.
    """

    most: int
    elements: float = math.inf


def chosen(names: Iterable[str], weight: Callable[[str], float], limits: Limits, *, elements: int = 0) -> list[str]:
    """The heaviest first, in the given order where weights are equal. elements: those that the results of a run hold."""
    return sorted(names, key=lambda name: -weight(name))[: limits.most if elements <= limits.elements else 0]
