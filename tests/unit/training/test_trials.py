"""FP16 steps at loss scales, on gradients of which half lie below FP16's smallest number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.execution.step import Step
from auditor.records.training import LossScale
from auditor.training.own import Lowering, settle
from auditor.training.trials import trial, trials_of
from tests.stepping import stepped

WINDOW = LossScale(2.0**6, 2.0**23, 2.0**10, 0.5, 0.01, None, "", None, {}, {})


@pytest.fixture
def step() -> Step:
    # The two outputs get gradients of 2^-8 and 2^-30; half of FP16's smallest number is 2^-25.
    layer = nn.Linear(1, 2, bias=False)
    nn.init.ones_(layer.weight)
    return settle(stepped(layer, torch.ones(1, 1), torch.tensor([[2.0**-8, 2.0**-30]])))


def test_unscaled_half_of_them_is_lost(step: Step) -> None:
    found = trial(step, Lowering("fp16"), 1.0, WINDOW)
    assert (found.flushed, found.predicted) == (0.5, 0.5)
    assert (found.overflow, found.predicted_overflow) == (False, False)


def test_scaled_none_is(step: Step) -> None:
    found = trial(step, Lowering("fp16"), 2.0**10, WINDOW)
    assert (found.flushed, found.predicted, found.overflow) == (0.0, 0.0, False)


def test_beyond_the_window_the_larger_overflows(step: Step) -> None:
    # 2^-8 * 2^24 = 2^16 > 65504
    found = trial(step, Lowering("fp16"), 2.0**24, WINDOW)
    assert (found.overflow, found.predicted_overflow) == (True, True)


def test_three_scales_are_tried(step: Step) -> None:
    found = trials_of(step, Lowering("fp16"), WINDOW)
    assert [one.scale for one in found] == [1.0, 2.0**10, 2.0**24]
