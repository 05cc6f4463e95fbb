"""Repeats the comparison of a low-precision step with FP32's at slightly changed weights, until it is sure on which side
of a threshold the median error lies.

A step that makes discrete decisions (a matching, a top-k, a threshold) has gradients whose error depends on whether one
decision flips. A single step then says little about the steps that follow it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ...isolation import isolate
from ...isolation.weights import change_weights
from ...training.replay import Step, gradient_error
from ...training.step import FP32, StepPrecision, own_step

NEAR = 4.0
"""An error is drawn again if it is above 1 / NEAR of the threshold."""

MOST = 15
"""Maximum number of draws."""

UNSURE = 0.05
"""Probability that the interval does not contain the median, at most."""


def draw_errors(step: Step, low: StepPrecision, scale: float, first: float, threshold: float) -> tuple[float, ...]:
    """Relative L2 errors of low-precision gradients, of which `first` is known and the others are at changed weights.

    Draws end once the interval of the median excludes the threshold, or after MOST draws. A draw that fails, or whose
    gradients are not finite, ends them too. Without need for draws, the result is (first,).
    """
    errors = [first]
    if not threshold / NEAR < first < math.inf:
        return (first,)
    while len(errors) < MOST and side_of(errors, threshold) == "unclear":
        error = _error_at_changed_weights(step, low, scale, seed=len(errors))
        if not math.isfinite(error):
            break
        errors.append(error)
    return tuple(errors)


def _error_at_changed_weights(step: Step, low: StepPrecision, scale: float, seed: int) -> float:
    """Error of the low-precision gradients with random changes of the weights; NaN if a step fails in FP32 or low."""
    model = step.subject.model
    with isolate(model):
        change_weights(model, seed)
        reference, rounded = own_step(step, FP32), own_step(step, low, scale)
    if reference.failure is not None or rounded.failure is not None or not reference.finite:
        return math.nan
    return gradient_error(reference.gradients, rounded.gradients)


def interval_of(errors: Sequence[float]) -> tuple[float, float]:
    """An interval that contains the median of the errors' distribution, by the sign test; (0, inf) for few errors.

    Source: the order statistics of a sample enclose the median with binomial probabilities, whatever the distribution.
    """
    count, ordered = len(errors), sorted(errors)
    below = 0.0
    outer = 0
    for k in range(count):
        below += math.comb(count, k) / 2**count
        if 2 * below > UNSURE:
            break
        outer = k + 1
    return (ordered[outer - 1], ordered[-outer]) if outer else (0.0, math.inf)


def side_of(errors: Sequence[float], threshold: float) -> str:
    """`within`, `beyond`, or `unclear`: where the median of the errors' distribution lies."""
    least, most = interval_of(errors)
    if most <= threshold:
        return "within"
    return "beyond" if least > threshold else "unclear"


def decisive_error(errors: Sequence[float]) -> float:
    """The error that decides: the median of all draws."""
    return median(errors)
