"""The numbers by which a step multiplies or divides its loss, read from the loss's graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...numerics.entries import tensors_in


def factors_of(node: Any, scaled: Any) -> Iterator[float]:
    """The numbers by which a chain of scalar operations divides the loss, the last first; a factor x as 1/x."""
    return (number for number, _ in _scalings(node, scaled))


def divisors_of(roots: Any, scaled: Any) -> list[float]:
    """The numbers by which a chain of scalar operations divides one loss, without its factors, such as 0.5 of a loss."""
    nodes = [x.grad_fn for x in tensors_in(roots) if x.grad_fn is not None]
    return [number for number, divides in _scalings(nodes[0], scaled) if divides] if len(nodes) == 1 else []


def _scalings(node: Any, scaled: Any) -> Iterator[tuple[float, bool]]:
    """(number that divides the loss, whether by a division) of a chain of scalar operations, the last first."""
    while node is not None:
        name = node.name()
        following = node.next_functions[0][0] if node.next_functions else None
        if name in ("DivBackward0", "MulBackward0") and node not in scaled:
            other = node._saved_other
            if following is None and name == "MulBackward0":  # the constant is the first argument
                following, other = node.next_functions[1][0], node._saved_self
            is_mean = following is not None and following.name().startswith("SumBackward")
            if is_mean or other is None or other.numel() != 1 or other.requires_grad or not float(other):
                return
            divides = name == "DivBackward0"
            yield float(other) if divides else 1 / float(other), divides
        elif node not in scaled and name != "ToCopyBackward0":
            return
        node = following


def given_factor(gradients: Any) -> list[float]:
    """What the step passes to `backward` as gradient of one loss, as the number that divides the loss."""
    given = tensors_in(gradients)
    if len(given) != 1 or given[0].numel() != 1:
        return []
    value = float(given[0].detach())
    return [] if value in (0.0, 1.0) or not math.isfinite(value) else [1 / value]
