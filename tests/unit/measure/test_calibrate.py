"""Several batches, one verdict: the worst error, the widest range, the mean square of what adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.measure.calibrate import Calibration, calibrate
from auditor.measure.measure import measure
from auditor.records import Subject
from tests.support.capturing import Function
from tests.support.subjects import FORMATS, effects_of, only, subject_of


def subject_on(model: nn.Module, *inputs: Tensor) -> Subject:
    """One batch per input."""
    return replace(subject_of(model), batches=tuple(((x,), {}) for x in inputs))


def calibrated(model: nn.Module, *inputs: Tensor) -> tuple[Calibration, str]:
    """The calibration, and the name of the model's one multiplication."""
    subject = subject_on(model, *inputs)
    traced = capture(subject, FORMATS)
    return calibrate(traced, subject, FORMATS, 0, lambda name: None), only(traced, "mul").name


SQUARE = Function(lambda x: (x * x).tanh())
SMALL, HUGE = torch.tensor([[0.5]]), torch.tensor([[300.0]])


@pytest.mark.parametrize("inputs", [(SMALL, HUGE), (HUGE, SMALL), (SMALL, HUGE, SMALL)])
def test_an_overflow_in_one_batch_is_an_overflow(inputs: tuple[Tensor, ...]) -> None:
    found, name = calibrated(SQUARE, *inputs)
    error = found.errors[name]["fp16"]
    assert (error.overflow, error.cause, error.born) == (1, "overflow", True)
    assert found.contributions[name]["fp16"].decided_by != "not-run"
    assert found.batches == len(inputs)


def test_ranges_are_joined() -> None:
    found, name = calibrated(SQUARE, SMALL, HUGE)
    span = found.ranges[name]
    assert (span.max_abs, span.min_abs) == (90000.0, 0.25)
    assert span.exponents == {-2: 1, 16: 1}  # 0.25 = 2^-2, 90000 = 1.37 * 2^16


def test_contributions_worst_for_the_verdict_and_mean_square_for_the_sum() -> None:
    model = Function(lambda x: x * 3.0)
    inputs = [torch.tensor([[1 + 2.0**-11]]), torch.tensor([[1.0]]), torch.tensor([[1 + 2.0**-12]])]
    found, name = calibrated(model, *inputs)
    alone = []
    for x in inputs:
        subject = subject_on(model, x)
        alone.append(effects_of(measure(capture(subject, FORMATS), model, subject.batches[0], FORMATS))[name]["fp16"])
    together = found.contributions[name]["fp16"]
    assert together.isolated == max(one.isolated for one in alone)
    for kind in ("own", "cast"):
        squares = [getattr(one, kind) ** 2 for one in alone]
        assert getattr(together, kind) == pytest.approx((sum(squares) / 3) ** 0.5)
