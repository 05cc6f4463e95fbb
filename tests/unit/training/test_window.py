"""The window of loss scales, on gradients whose magnitudes are written down."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from auditor.execution.step import Step
from auditor.numerics.histogram import magnitudes_of
from auditor.records.training import LossScale, ParameterGradients
from auditor.training.own import Lowering, settle
from auditor.training.window import (
    loss_scale,
    lost_by_adam,
    lost_by_sgd,
    ratios_of,
    scaler_code,
    trial,
    trials_of,
)
from tests.support.stepping import stepped


def powers(*exponents: int, each: int = 100) -> torch.Tensor:
    """1.5 times powers of two, so that nothing lies on an edge."""
    return torch.cat([torch.full((each,), 1.5 * 2.0**e) for e in exponents])


def test_an_open_window() -> None:
    # the smallest FP16 subnormal is 2^-24 and half of it survives: 1.5 * 2^-30 needs 2^5; 1.5 * 2^3 allows 2^12
    window = loss_scale({"a": magnitudes_of(powers(3)), "b": magnitudes_of(powers(-30))})
    assert window is not None
    assert (window.minimum, window.maximum, window.init) == (2.0**5, 2.0**12, 2.0**8)
    assert window.flushed_unscaled == 0.5
    assert (window.closed_by, window.largest, window.starved) == (None, "a", None)


def test_an_empty_window_names_the_module_that_closes_it() -> None:
    window = loss_scale({"a": magnitudes_of(powers(3)), "b": magnitudes_of(powers(-40))})
    assert window is not None
    assert window.init is None
    assert (window.closed_by, window.starved) == ("a", "b")
    assert window.minimum > window.maximum


def test_a_share_may_be_flushed() -> None:
    few = torch.cat((powers(0, each=1000), powers(-60, each=9)))
    window = loss_scale({"a": magnitudes_of(few)})
    assert window is not None
    assert window.minimum == 1.0
    many = loss_scale({"a": magnitudes_of(torch.cat((powers(0, each=1000), powers(-60, each=11))))})
    assert many is not None
    assert many.minimum == 2.0**35


def test_gradients_beyond_fp16_ask_for_a_scale_below_one() -> None:
    window = loss_scale({"a": magnitudes_of(powers(20))})
    assert window is not None
    assert window.maximum == 2.0**-5  # 1.5 * 2^15 is the largest of these that is below 65504
    assert window.minimum <= window.maximum
    assert window.init is not None


def test_no_low_gradient_no_window() -> None:
    assert loss_scale({}) is None
    assert loss_scale({"a": magnitudes_of(torch.zeros(4))}) is None


def test_the_scaler_is_code_that_runs() -> None:
    scaler = eval(scaler_code(2.0**20), {"GradScaler": lambda **options: torch.amp.GradScaler("cpu", **options)})
    assert scaler.get_scale() == 2.0**20
    assert scaler.get_growth_interval() == 2000


def parameter(ratios: Mapping[int, int], weight: torch.Tensor) -> ParameterGradients:
    return ParameterGradients("w", "", magnitudes_of(weight), magnitudes_of(torch.ones(1)), ratios, True)


def test_gradients_against_half_a_spacing() -> None:
    # BF16 spaces by 2^-7 in [1, 2): half of it is 2^-8. By 2^-8 in [0.5, 1): half of it is 2^-9.
    weight = torch.tensor([1.0, -1.5, 0.75, 1.0])
    gradient = torch.tensor([3 * 2.0**-8, 1.5 * 2.0**-10, -1.5 * 2.0**-9, 0.0])
    # 3 = 1.5 * 2^1; 1.5 * 2^-2; 1.5 * 2^0; and a weight that does not move
    assert ratios_of(weight, gradient) == {1: 1, -2: 1, 0: 1}


def test_next_to_zero_there_is_room_for_any_update() -> None:
    (ratio,) = ratios_of(torch.zeros(3), torch.tensor([1e-30, 0.0, 1e-30]))
    assert ratio > 150
    assert ratios_of(torch.ones(1), torch.tensor([float("inf")])) == {}


def test_the_share_that_sgd_loses() -> None:
    found = [parameter({0: 4, 2: 2, 5: 2}, torch.ones(1))]
    # an update of 2^-2 |g| is lost below half a spacing, where the ratio is below 2: the 4 of 8 in the bin of 0
    assert lost_by_sgd(found, 2.0**-2) == 4 / 8
    # at 2^-2.5 the edge falls in the middle of the bin of 2, on the logarithmic scale: half of its 2
    assert lost_by_sgd(found, 2.0**-2.5) == pytest.approx(5 / 8)
    assert lost_by_sgd(found, 1.0) == 0.0
    assert lost_by_sgd([], 1.0) == 0.0


def test_the_share_that_adam_loses() -> None:
    # Every weight moves by 2^-10. Half a spacing is 2^-8 |w| rounded down to a power of two: 2^-10 at 2^-2, where the
    # update holds, 2^-9 at 2^-1 and 2^-8 at 1, where it does not. A weight of zero can move.
    weight = torch.tensor([0.25, 0.25, 0.25, 0.5, 1.0, 0.0, 0.0, 0.0])
    assert lost_by_adam([parameter({}, weight)], 2.0**-10) == 2 / 8
    assert lost_by_adam([parameter({}, weight)], 2.0**-11) == 5 / 8
    assert lost_by_adam([], 1.0) == 0.0


WINDOW = LossScale(2.0**6, 2.0**23, 2.0**10, 0.5, 0.01, None, "", None, {}, {})


@pytest.fixture
def step() -> Step:
    # The two outputs get gradients of 2^-8 and 2^-30; half of FP16's smallest number is 2^-25.
    layer = nn.Linear(1, 2, bias=False)
    nn.init.ones_(layer.weight)
    return settle(stepped(layer, torch.ones(1, 1), torch.tensor([[2.0**-8, 2.0**-30]])))


@pytest.mark.parametrize(
    ("scale", "flushed", "overflow"),
    [(1.0, 0.5, False), (2.0**10, 0.0, False), (2.0**24, 0.0, True)],  # 2^-8 * 2^24 = 2^16 > 65504
)
def test_what_becomes_of_gradients_at_a_scale(step: Step, scale: float, flushed: float, overflow: bool) -> None:
    found = trial(step, Lowering("fp16"), scale, WINDOW)
    assert (found.flushed, found.predicted) == (flushed, flushed)
    assert (found.overflow, found.predicted_overflow) == (overflow, overflow)


def test_three_scales_are_tried(step: Step) -> None:
    found = trials_of(step, Lowering("fp16"), WINDOW)
    assert [one.scale for one in found] == [1.0, 2.0**10, 2.0**24]
