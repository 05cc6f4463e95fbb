"""Updates that BF16 takes back: ratios and shares on numbers that are written down."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from auditor.numerics.histogram import magnitudes_of
from auditor.records.training import ParameterGradients
from auditor.training.window import RATES, lost_by_adam, lost_by_sgd, outlook, ratios_of


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


def test_the_outlook_lists_every_rate() -> None:
    adam, sgd = outlook(iter([parameter({0: 1}, torch.ones(1))]))
    assert tuple(adam) == tuple(sgd) == RATES
    assert list(sgd.values()) == [1.0] * 5  # no rate reaches 1
    assert adam[1e-2] == 0.0  # 0.01 is more than 2^-8 = 0.0039
    assert adam[1e-3] == 1.0
