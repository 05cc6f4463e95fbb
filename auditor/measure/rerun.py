"""Which operations are run again one by one, where first order does not tell what their errors do."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def chosen(
    names: Iterable[str], weight: Callable[[str], float], most: int, *, elements: int = 0, light: float = float("inf")
) -> list[str]:
    """The heaviest first, in the given order where weights are equal, and at most `most`.

    Every one costs a run of the model: none where the results of one run hold more than `light` elements.
    """
    return sorted(names, key=lambda name: -weight(name))[: most if elements <= light else 0]
