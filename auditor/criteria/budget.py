"""Makes the measure of the error budget: relative L2, the user's metric, or shares of criteria's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ..errors import CallbackError, let_through
from ..isolation.run_model import run_model
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
    """The error budget, its measure, and the measure's value for a relative L2 error of 1, see measure.rerun.OutputMetric.

    The measure is relative L2, the user's metric, or the largest share of a criterion's limit (the user's criteria, and
    default ones for discrete outputs). Raises: AuditorError(slug="bad-criterion") if a criterion does not fit the
    model's outputs; CallbackError(slug="bad-callback") if the user's metric fails.
    """
    flips = metric is None and may_flip(capture)
    if metric is None and not criteria and not flips:
        return max_error, output_error, 1.0
    outputs = run_model(subject.model, subject.batches[0], seed=seed)
    metric = _as_error(_of_the_cpu(metric), metric, outputs, max_error) if metric is not None else None
    if flips:
        criteria = (*criteria, *by_default(criteria, outputs, capture, max_error))
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


def _as_error(measure: Distance, metric: Distance, outputs: Sequence[torch.Tensor], max_error: float) -> Distance:
    """The user's metric as an error, which is 0 for equal outputs. measure: the metric, as `_of_the_cpu` calls it.

    If higher values are better (`metric.higher_is_better` is True), the error is the loss relative to the value for
    equal outputs; if that is infinite, as of PSNR in dB, the error is 10^(-value / 20). Raises:
    CallbackError(slug="bad-callback") if equal outputs exceed the budget although lower values are better.
    """
    name, best = name_of(measure), measure(outputs, outputs)
    if getattr(metric, "higher_is_better", None) is not True:
        if best > max_error:
            hint = f"if higher values are better, set `{name}.higher_is_better = True`: the error is then the loss"
            message = f"metric={name} returned {best:.3g} for equal outputs, above max_error, {max_error:.3g}"
            raise CallbackError(f"{message}: {hint}", "bad-callback")
        return measure

    def loss(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
        value = measure(reference, candidate)
        return best - value if math.isfinite(best) else 10 ** (-value / 20)

    loss.__name__ = f"loss of {name}"
    return loss


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
