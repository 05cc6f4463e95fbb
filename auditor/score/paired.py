"""Scores compared: the number of the FP32 model, a plan's, their difference, and how well it is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import first_line
from ..records.run import Evaluation, Score
from .calling import Given, Unscored, number
from .function import Scoring

ROUNDING = 1e-9
"""Share of `max_drop` by which a drop may exceed it and be it: 0.99 - 0.98 is more than 0.01 in binary."""


def settled(scoring: Scoring, given: Given) -> Evaluation:
    """What the function says of the FP32 model. Raises: Unscored."""
    value = _value(scoring, given.values)
    samples = None if given.single else len(given.values)
    formula = None if scoring.of_mean is None else str(getattr(scoring.of_mean, "__name__", "a function"))
    return Evaluation(scoring.name, scoring.better, scoring.max_drop, value, samples, formula, given.calls)


def judged(scoring: Scoring, fp32: Given, plan: Given | str) -> Score:
    """A plan's score against the FP32 model's, or why there is none. plan: what the function gave, or why it gave nothing."""
    if isinstance(plan, str):
        return _without(scoring, plan)
    if (plan.single, len(plan.values)) != (fp32.single, len(fp32.values)):
        return _without(scoring, f"the function gave {plan.counted}, and {fp32.counted} in FP32: they are no pairs")
    try:
        value, reference = _value(scoring, plan.values), _value(scoring, fp32.values)
    except Unscored as error:
        return _without(scoring, str(error))
    known = None if plan.single else standard_error(fp32.values, plan.values, scoring.of_mean or _same)
    difference = value - reference
    return Score(value, difference, known, _passed(scoring, difference))


def standard_error(
    reference: Sequence[float], candidate: Sequence[float], of_mean: Callable[[float], float]
) -> float | None:
    """Of of_mean(mean of candidate) - of_mean(mean of reference), entry i of the one paired with entry i of the other.

    The jackknife: each pair is left out once. For plain means that is the standard deviation of the differences, with
    n - 1, over the root of n. None where fewer than two pairs, or a function that fails near the mean, say nothing.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, section 11.5.
    """
    n = len(reference)
    if n < 2:
        return None
    sums = math.fsum(reference), math.fsum(candidate)
    try:
        left_out = [
            float(of_mean((sums[1] - c) / (n - 1))) - float(of_mean((sums[0] - r) / (n - 1)))
            for r, c in zip(reference, candidate, strict=True)
        ]
    except Exception:  # the user's function, near a mean that it took
        return None
    centre = math.fsum(left_out) / n
    found = math.sqrt((n - 1) / n * math.fsum((x - centre) ** 2 for x in left_out))
    return found if math.isfinite(found) else None


def _value(scoring: Scoring, values: Sequence[float]) -> float:
    """The mean, or what the user makes of it. Raises: Unscored."""
    mean = values[0] if len(values) == 1 else math.fsum(values) / len(values)
    if scoring.of_mean is None:
        return mean
    try:
        return number(scoring.of_mean(mean), f"of_mean({mean:.6g})")
    except Unscored:
        raise
    except Exception as error:
        raise Unscored(f"of_mean({mean:.6g}) raised {type(error).__name__}: {first_line(error)}") from error


def _passed(scoring: Scoring, difference: float) -> bool | None:
    if scoring.max_drop is None:
        return None
    drop = -difference if scoring.better == "higher" else difference
    return drop <= scoring.max_drop or math.isclose(drop, scoring.max_drop, rel_tol=ROUNDING)


def _without(scoring: Scoring, why: str) -> Score:
    return Score(None, passed=None if scoring.max_drop is None else False, failure=why)


def _same(value: float) -> float:
    return value
