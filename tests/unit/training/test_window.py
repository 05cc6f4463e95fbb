"""The window of loss scales, on gradients whose magnitudes are written down."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.numerics.histogram import magnitudes_of
from auditor.training.window import loss_scale, scaler_code


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


def test_a_narrow_window_starts_at_its_lower_end() -> None:
    window = loss_scale({"a": magnitudes_of(powers(3)), "b": magnitudes_of(powers(-36))})
    assert window is not None
    assert (window.minimum, window.maximum, window.init) == (2.0**11, 2.0**12, 2.0**11)


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


@pytest.mark.parametrize("exponent", [20, 40, 100])
def test_a_window_far_below_one_is_shown_from_end_to_end(exponent: int) -> None:
    window = loss_scale({"a": magnitudes_of(powers(exponent))})
    assert window is not None
    assert min(window.flushed) < math.log2(window.minimum) <= math.log2(window.maximum) < max(window.flushed)
    assert window.flushed.keys() == window.subnormal.keys()


def test_no_low_gradient_no_window() -> None:
    assert loss_scale({}) is None
    assert loss_scale({"a": magnitudes_of(torch.zeros(4))}) is None


def test_the_scaler_is_code_that_runs() -> None:
    scaler = eval(scaler_code(2.0**20), {"GradScaler": lambda **options: torch.amp.GradScaler("cpu", **options)})
    assert scaler.get_scale() == 2.0**20
    assert scaler.get_growth_interval() == 2000
