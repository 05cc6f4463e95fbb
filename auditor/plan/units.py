"""Converts contributions to the unit of the user's metric, so that they can be compared with the user's budget."""

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
"""Above this budget contributions are not converted: in the metric's unit they could reach FORBIDDEN."""


def yardstick_of(subject: Subject, options: Settings, capture: Capture) -> Yardstick:
    """The error budget and its metric: relative L2, the user's metric, or shares of criteria's limits (the user's, and
    the default ones for discrete outputs).

    Raises: AuditorError(slug="bad-criterion") if a criterion does not fit the model's outputs;
    CallbackError(slug="bad-callback") if the user's metric fails.
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
    """The user's metric, called with all outputs on the CPU.

    That function raises CallbackError(slug="bad-callback") if the metric raises on finite outputs or returns no number.
    """
    name = name_of(metric)

    def measure_on_cpu(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
        try:
            result: Any = metric(on_cpu(reference), on_cpu(candidate))
        except Exception as error:
            let_through(error)
            if not math.isfinite(output_error(reference, candidate)):
                return math.nan  # a metric may raise on non-finite outputs, which fail every budget
            raise CallbackError(
                f"metric={name} raised {blame(error)}: it is called as metric(reference, candidate) with two lists of tensors",
                slug="bad-callback",
            ) from error
        with suppress(AttributeError, TypeError, ValueError, RuntimeError):
            result = result.item()  # for a tensor or an array with one entry
        if isinstance(result, Real):
            return float(result)
        words = "None" if result is None else f"a value of type {type(result).__name__}"
        raise CallbackError(f"metric={name} returned {words}: return one number; smaller is better", "bad-callback")

    measure_on_cpu.__name__ = name
    return measure_on_cpu


def unit_of(metric: Distance, reference: Sequence[torch.Tensor], max_error: float) -> float:
    """Value of the metric per unit of relative L2 error, from the outputs rounded to BF16.

    1 if there is no finite value above 0 (a metric that counts flips may be 0), or if the budget exceeds
    LARGEST_BUDGET.
    """
    rounded = [round_tree(output, FORMATS["bf16"]) for output in reference]
    relative, measured = output_error(reference, rounded), metric(reference, rounded)
    if not (0 < relative < math.inf and 0 < measured < math.inf and max_error <= LARGEST_BUDGET):
        return 1.0
    return measured / relative


def in_unit(found: Calibration, unit: float) -> Calibration:
    """The calibration with all contributions multiplied by `unit`."""

    def times(one: Contribution) -> Contribution:
        return replace(one, isolated=one.isolated * unit, own=one.own * unit, cast=one.cast * unit)

    known = found.contributions.items() if unit != 1.0 else ()
    changed = {name: {fmt: times(one) for fmt, one in by_format.items()} for name, by_format in known}
    return replace(found, contributions=changed) if changed else found
