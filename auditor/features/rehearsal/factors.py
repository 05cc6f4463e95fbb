"""The numbers by which a step multiplies or divides its loss, read from the loss's graph."""

from __future__ import annotations

import math
from typing import Any

from ...numerics.entries import tensors_in

MOST_TERMS = 256
"""Maximum number of terms of a loss that are read."""


def factors_of(node: Any, scaled: Any) -> list[float]:
    """The numbers by which a chain of scalar operations divides the loss, the last first; a factor x as 1/x.

    If the chain begins with a sum, as in `a * 1024 + b * 1024`, the numbers that all its terms have in common follow.
    """
    numbers, _ = _read_chain(node, scaled)
    own = [number for number, _ in numbers]
    first, *others = (list(factors[len(own) :]) for factors, _ in terms_of(node, scaled))
    for other in others:
        first = [number for number in first if number in other]
    return [*own, *first]


def divisors_of(roots: Any, scaled: Any) -> list[float]:
    """The numbers by which a chain of scalar operations divides one loss, without its factors, such as 0.5 of a loss."""
    nodes = [x.grad_fn for x in tensors_in(roots) if x.grad_fn is not None]
    if len(nodes) != 1:
        return []
    numbers, _ = _read_chain(nodes[0], scaled)
    return [number for number, divides in numbers if divides]


def terms_of(node: Any, scaled: Any, reads_means: bool = False) -> list[tuple[tuple[float, ...], Any]]:
    """(numbers that divide it, as in `factors_of`; the node at which its own graph begins) of each term of a loss; one term
    if it is no sum. reads_means: whether the numbers include those of means by hand, as in `x.sum() / n`."""
    terms = list[tuple[tuple[float, ...], Any]]()
    waiting = [(node, tuple[float, ...]())]
    while waiting and len(terms) < MOST_TERMS:
        node, before = waiting.pop()
        numbers, end = _read_chain(node, scaled, reads_means)
        divided_by = (*before, *(number for number, _ in numbers))
        is_sum = end is not None and end.name() in ("AddBackward0", "SubBackward0") and end not in scaled
        if not is_sum:
            terms.append((divided_by, end))
            continue
        (first, _), (second, _) = end.next_functions  # None for a number, which has no graph
        if first is not None:
            waiting.append((first, divided_by))
        if second is not None:
            alpha = abs(float(end._saved_alpha))
            waiting.append((second, (*divided_by, 1 / alpha) if alpha not in (0.0, 1.0) else divided_by))
    return terms


def _read_chain(node: Any, scaled: Any, reads_means: bool = False) -> tuple[list[tuple[float, bool]], Any]:
    """[(number that divides the loss, whether by a division)] of a chain of scalar operations, the last first; and the node
    before the chain, None without one. reads_means: see `terms_of`."""
    numbers = list[tuple[float, bool]]()
    while node is not None:
        name = node.name()
        following = node.next_functions[0][0] if node.next_functions else None
        if name in ("DivBackward0", "MulBackward0") and node not in scaled:
            other = node._saved_other
            if following is None and name == "MulBackward0":  # the constant is the first argument
                following, other = node.next_functions[1][0], node._saved_self
            is_mean = following is not None and following.name().startswith("SumBackward")
            is_constant = other is not None and other.numel() == 1 and not other.requires_grad and float(other) != 0
            if not is_constant or (is_mean and not reads_means):
                return numbers, node
            divides = name == "DivBackward0"
            numbers.append((float(other) if divides else 1 / float(other), divides))
        elif node not in scaled and name != "ToCopyBackward0":
            return numbers, node
        node = following
    return numbers, None


def given_factor(gradients: Any) -> list[float]:
    """What the step passes to `backward` as gradient of one loss, as the number that divides the loss."""
    given = tensors_in(gradients)
    if len(given) != 1 or given[0].numel() != 1:
        return []
    value = float(given[0].detach())
    return [] if value in (0.0, 1.0) or not math.isfinite(value) else [1 / value]
