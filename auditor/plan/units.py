"""Contributions in the unit of the user's own metric, so that verdicts and predictions speak of the budget they gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import Any

import torch

from ..criteria.criterion import name_of
from ..criteria.defaults import by_default, may_flip
from ..criteria.measure import criteria_for
from ..errors import CallbackError, let_through
from ..isolation.answer import answer
from ..isolation.outputs import on_cpu
from ..loading.target import blame
from ..measure.calibrate import Calibration
from ..measure.rerun import Yardstick
from ..numerics.casting import round_tree
from ..numerics.formats import FORMATS
from ..numerics.metrics import output_error
from ..records import Capture, Contribution, Distance, Subject
from ..settings import Settings

LARGEST_BUDGET = 100.0
"""Budgets beyond it leave contributions relative: they would come near what the solver charges for prohibitions."""


def yardstick_of(subject: Subject, options: Settings, capture: Capture) -> Yardstick:
    """The budget, and what it is measured by: relative L2, the user's metric, or shares of what criteria allow, theirs and
    those that discrete outputs have by default.

    Raises: AuditorError(slug="bad-criterion") where a criterion does not fit what the model returns.
    """
    metric, criteria, max_error = options.metric, options.limits, options.max_error
    flips = metric is None and may_flip(capture)
    if metric is None and not criteria and not flips:
        return Yardstick(max_error)
    outputs = answer(subject.model, subject.batches[0], seed=options.seed)
    metric = _of_the_cpu(metric) if metric is not None else None
    if flips:
        criteria = (*criteria, *by_default(criteria, outputs, capture))
    if criteria:
        return Yardstick(1.0, criteria_for(criteria, max_error, outputs, metric))
    return Yardstick(max_error) if metric is None else Yardstick(max_error, metric, unit_of(metric, outputs, max_error))


def _of_the_cpu(metric: Distance) -> Distance:
    """The user's metric, given the outputs where it is given those of the patched models: on the CPU.

    It raises CallbackError(slug="bad-callback") where the metric does, or returns no single number.
    """
    name = name_of(metric)

    def measure_on_cpu(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
        try:
            result: Any = metric(on_cpu(reference), on_cpu(candidate))
        except Exception as error:
            let_through(error)
            if not math.isfinite(output_error(reference, candidate)):
                return math.nan  # a metric may refuse outputs that are not finite, which no budget allows
            raise CallbackError(
                f"metric={name} raised {blame(error)}: it is called as metric(reference, candidate), two lists of tensors",
                slug="bad-callback",
            ) from error
        with suppress(AttributeError, TypeError, ValueError, RuntimeError):
            result = result.item()  # of a tensor or an array with one entry
        if isinstance(result, Real):
            return float(result)
        words = "None" if result is None else f"a value of type {type(result).__name__}"
        raise CallbackError(f"metric={name} returned {words}: it returns one number, smaller is better", "bad-callback")

    measure_on_cpu.__name__ = name
    return measure_on_cpu


def unit_of(metric: Distance, reference: Sequence[torch.Tensor], max_error: float) -> float:
    """What the metric makes of one unit of relative L2 error, seen on the outputs rounded to BF16.

    1 where rounding the outputs says nothing: a metric that counts flips or non-finite entries stays 0.
    """
    rounded = [round_tree(output, FORMATS["bf16"]) for output in reference]
    relative, measured = output_error(reference, rounded), metric(reference, rounded)
    if not (0 < relative < math.inf and 0 < measured < math.inf and max_error <= LARGEST_BUDGET):
        return 1.0
    return measured / relative


def in_unit(found: Calibration, unit: float) -> Calibration:
    """The same measurements, contributions times `unit`."""

    def times(one: Contribution) -> Contribution:
        return replace(one, isolated=one.isolated * unit, own=one.own * unit, cast=one.cast * unit)

    known = found.contributions.items() if unit != 1.0 else ()
    changed = {name: {fmt: times(one) for fmt, one in by_format.items()} for name, by_format in known}
    return replace(found, contributions=changed) if changed else found
