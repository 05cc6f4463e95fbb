"""Squares of parts scatter less than squares of the whole, and stand in for them where errors are independent."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from auditor.measure.probes import Sums, by_level, chance
from tests.support.subjects import normal


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Quantiles of chi-squared, as scipy.stats gives them, at 1 in 2069 (3.3 standard deviations) and its complement.
    [(8, 0.704, 27.952), (16, 3.517, 41.407), (64, 33.097, 108.026), (512, 412.945, 624.234)],
)
def test_whatchance_explains(count: int, low: float, high: float) -> None:
    assert chance(count)[0] * count == pytest.approx(low, rel=0.15)
    assert chance(count)[1] * count == pytest.approx(high, rel=0.01)


def summed(inner: Tensor) -> Sums:
    sums = Sums()
    sums.add(*by_level([inner])[0])
    return sums


def by_hand(inner: Tensor, parts: int) -> float:
    """Squares of the sums of runs of equal length."""
    return float(inner.double().unflatten(1, (parts, -1)).sum(2).square().sum())


def test_independent_parts_add_up_in_squares() -> None:
    inner = normal(8, 4096)
    sums = summed(inner)
    assert sums.squares == pytest.approx([by_hand(inner, parts) for parts in (1024, 128, 16, 1)])
    assert sums.counts == [8 * 1024, 8 * 128, 8 * 16, 8]
    assert sums.square() == sums.squares[0]


@pytest.mark.parametrize("parts", [128, 16, 1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parts_that_pull_together_or_cancel_are_summed_first(parts: int, sign: float) -> None:
    # Runs of one and the same error each, or of one error and its opposite by turns; run and run are independent.
    errors, pattern = normal(64, parts, 1), torch.tensor([1.0, sign]).repeat(512 // parts)
    inner = (errors * pattern).reshape(64, 1024)
    assert summed(inner).square() == pytest.approx(by_hand(inner, parts), rel=1e-9, abs=1e-9)
    assert summed(inner).square() != pytest.approx(by_hand(inner, 1024), rel=0.5)


@pytest.mark.parametrize("given", [1, 3, 17, 1000, 1025])
def test_odd_numbers_of_parts(given: int) -> None:
    inner = normal(2, given)
    sums = summed(inner)
    assert sums.squares[-1] == pytest.approx(float(inner.double().sum(1).square().sum()))
    assert sums.counts[-1] == 2
    assert sums.counts[0] <= 2 * 1024


def test_the_scatter_is_the_standard_error_of_the_root() -> None:
    sums = summed(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    squares = [1.0, 4.0, 9.0, 16.0]
    # Of the mean of four: deviation / sqrt(4), relative to the mean, halved by the root.
    assert sums.scatter() == pytest.approx(statistics.stdev(squares) / 2 / statistics.mean(squares) / 2)
    assert math.isnan(summed(torch.ones(3, 5)).scatter())
    assert math.isnan(summed(torch.zeros(8, 5)).scatter())
