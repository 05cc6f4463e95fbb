"""Makes the measure of the error budget: relative L2, the user's metric, or shares of criteria's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ..errors import CallbackError, let_through
from ..isolation.answer import answer
from ..loading.target import blame
from ..numerics.casting import round_tree
from ..numerics.formats import FORMATS
from ..numerics.metrics import output_error
from ..records import Capture, Distance, Subject
from .criterion import Criterion, name_of
from .defaults import by_default, may_flip
from .measure import criteria_for
from .values import for_callback

LARGEST_BUDGET = 100.0
"""Above this error budget, contributions are not converted to the metric's unit, where they could reach FORBIDDEN."""


def budget_of(
    subject: Subject,
    capture: Capture,
    max_error: float,
    metric: Distance | None,
    criteria: tuple[Criterion, ...],
    seed: int,
) -> tuple[float, Distance, float]:
    """The error budget, its measure, and the measure's value for a relative L2 error of 1, see measure.rerun.Yardstick.

    The measure is relative L2, the user's metric, or the largest share of a criterion's limit (the user's criteria, and
    default ones for discrete outputs). Raises: AuditorError(slug="bad-criterion") if a criterion does not fit the
    model's outputs; CallbackError(slug="bad-callback") if the user's metric fails.
    """
    flips = metric is None and may_flip(capture)
    if metric is None and not criteria and not flips:
        return max_error, output_error, 1.0
    outputs = answer(subject.model, subject.batches[0], seed=seed)
    metric = _of_the_cpu(metric) if metric is not None else None
    if flips:
        criteria = (*criteria, *by_default(criteria, outputs, capture))
    if criteria:
        return 1.0, criteria_for(criteria, max_error, outputs, metric), 1.0
    if metric is None:
        return max_error, output_error, 1.0
    return max_error, metric, unit_of(metric, outputs, max_error)


def _of_the_cpu(metric: Distance) -> Distance:
    """The user's metric, called with all outputs on the CPU, and in FP32 instead of FP16 or BF16.

    The result raises CallbackError(slug="bad-callback") if the metric raises on finite outputs or returns no number.
    """
    name = name_of(metric)

    def measure_on_cpu(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
        try:
            result: Any = metric([for_callback(x) for x in reference], [for_callback(x) for x in candidate])
        except Exception as error:
            let_through(error)
            if not math.isfinite(output_error(reference, candidate)):
                return math.nan  # a metric may raise on non-finite outputs, which fail every budget
            raise CallbackError(
                f"metric={name} raised {blame(error)}: a metric is called as metric(reference, candidate) with two lists of tensors",
                slug="bad-callback",
            ) from error
        with suppress(TypeError, ValueError, RuntimeError):
            return float(result)  # also of a tensor or an array with one entry
        words = "None" if result is None else f"a value of type {type(result).__name__}"
        raise CallbackError(f"metric={name} returned {words}: return one number; smaller is better", "bad-callback")

    measure_on_cpu.__name__ = name
    return measure_on_cpu


def unit_of(metric: Distance, reference: Sequence[torch.Tensor], max_error: float) -> float:
    """Value of the metric per unit of relative L2 error, from the outputs rounded to BF16.

    The result is 1 if that value is not positive and finite (a metric that counts flips may be 0), or if the budget
    exceeds LARGEST_BUDGET.
    """
    rounded = [round_tree(output, FORMATS["bf16"]) for output in reference]
    relative, measured = output_error(reference, rounded), metric(reference, rounded)
    if not (0 < relative < math.inf and 0 < measured < math.inf and max_error <= LARGEST_BUDGET):
        return 1.0
    return measured / relative
