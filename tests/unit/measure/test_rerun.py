"""What a run with an operation low says, by the user's own measure too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from auditor.measure.rerun import PLAIN, Reruns, Yardstick
from tests.brute_force import true_isolated
from tests.capturing import Function
from tests.subjects import measurement_of, normal


def test_one_low_is_what_brute_force_says() -> None:
    measured = measurement_of(Function(lambda x: (x * 3.0).exp().sin()), normal(4, 3))
    reruns = Reruns(measured, "bf16", PLAIN)
    for name in measured.capture.nodes:
        error, flipped = reruns.together([name])
        assert error == pytest.approx(true_isolated(measured, name, "bf16"), rel=1e-5)
        assert not flipped


def test_what_raises_is_an_infinite_error() -> None:
    measured = measurement_of(Function(lambda x: (x * 3.0) @ x), torch.eye(2))
    assert Reruns(measured, "bf16", PLAIN).error("mul", torch.ones(3, 3)) == math.inf


def test_the_users_own_measure_is_asked_and_its_unit_taken_off() -> None:
    def largest(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
        return max(float((r - c).abs().max()) for r, c in zip(reference, low, strict=True))

    measured = measurement_of(Function(lambda x: (x * 3.0) + 1.0), torch.tensor([[1.0, 2.0]]))
    yardstick = Yardstick(0.5, largest, unit=10.0)
    assert yardstick.limit == 0.05
    off = Reruns(measured, "bf16", yardstick).error("mul", torch.tensor([[3.0, 6.5]]))
    assert off == pytest.approx(0.5 / 10.0)
    assert yardstick([torch.ones(2)], [torch.tensor([1.0, torch.inf])]) == math.inf
