"""Histograms of gradients, against what the formats really do to the same numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.numerics.formats import FORMATS
from auditor.numerics.histogram import (
    flushed,
    largest_scale,
    magnitudes_of,
    merged,
    significant,
    significant_entries,
    subnormal,
)


def gradients(seed: int, centre: float) -> torch.Tensor:
    """Log-normal magnitudes around 2 ** centre, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(500, generator=generator) * torch.exp2(torch.randn(500, generator=generator) * 5 + centre)
    return torch.cat((x, torch.zeros(20)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.floats(-40, 10), st.integers(-4, 30))
def test_shares_are_those_of_rounding_the_scaled_values(seed: int, centre: float, shift: int) -> None:
    x = gradients(seed, centre)
    exponents = magnitudes_of(x).exponents
    rounded = (x.double() * 2.0**shift).float().half()
    nonzero = x != 0
    lost = float((rounded[nonzero] == 0).double().mean())
    low = (rounded[nonzero] != 0) & (rounded[nonzero].abs().float() < FORMATS["fp16"].smallest_normal)
    assert flushed(exponents, FORMATS["fp16"], shift) == pytest.approx(lost)
    assert subnormal(exponents, FORMATS["fp16"], shift) == pytest.approx(float(low.double().mean()), abs=2 / 500)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.floats(-40, 10))
def test_the_largest_scale_is_the_last_that_does_not_overflow(seed: int, centre: float) -> None:
    x = gradients(seed, centre)
    scale = largest_scale(magnitudes_of(x), FORMATS["fp16"])
    assert bool(torch.isfinite((x.double() * scale).to(torch.float16)).all())
    assert not bool((x.double().abs() * 2 * scale <= 65504).all())


def test_counts_of_every_kind() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, 1.5, -2.0, 1e-40, float("inf"), float("nan")])
    spread = magnitudes_of(x)
    assert spread.exponents == {-127: 1, 0: 2, 1: 1}  # 1e-40 is subnormal in float32
    assert (spread.zeros, spread.nonfinite, spread.max_abs, spread.nonzero) == (2, 2, 2.0, 4)
    assert spread.norm == pytest.approx((1 + 2.25 + 4) ** 0.5)


def test_nothing_and_zeros_have_an_answer() -> None:
    for x in (torch.zeros(0), torch.zeros(3)):
        spread = magnitudes_of(x)
        assert flushed(spread.exponents, FORMATS["fp16"]) == 0.0
        assert largest_scale(spread, FORMATS["fp16"]) == float("inf")


def test_merging_is_the_histogram_of_both() -> None:
    a, b = gradients(1, -10), gradients(2, -20)
    both, apart = magnitudes_of(torch.cat((a, b))), merged([magnitudes_of(a), magnitudes_of(b)])
    assert both.exponents == apart.exponents
    assert both.norm == pytest.approx(apart.norm)
    assert both.rounding["bf16"] == pytest.approx(apart.rounding["bf16"], rel=0.05)


def test_merging_counts_what_is_no_magnitude_and_keeps_both_ends() -> None:
    a, b = torch.tensor([0.0, 3.0, float("inf")]), torch.tensor([0.0, 0.0, 0.25, float("nan")])
    found = merged([magnitudes_of(a), magnitudes_of(torch.zeros(1)), magnitudes_of(b)])
    assert (found.zeros, found.nonfinite, found.nonzero) == (4, 2, 2)
    assert (found.min_abs, found.max_abs) == (0.25, 3.0)
    assert merged([]).min_abs == 0.0


def test_rounding_tells_the_bits_that_stay() -> None:
    exact = torch.arange(1, 65).float()  # 7 bits: both formats hold them
    assert magnitudes_of(exact).rounding == {"fp16": 0.0, "bf16": 0.0}
    rough = magnitudes_of(torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 1)
    # half a spacing, evenly spread: 2^-8 / sqrt(3) of values near 1.5, in FP16 2^-11 / sqrt(3)
    assert rough.rounding["bf16"] == pytest.approx(2**-8 / 3**0.5 / 1.53, rel=0.05)
    assert rough.rounding["fp16"] == pytest.approx(2**-11 / 3**0.5 / 1.53, rel=0.05)


def test_what_fp32_would_lose_is_left_out() -> None:
    x = torch.tensor([1.0, 2.0**-24, 2.0**-25, 1e-30, 0.0])
    kept = significant(magnitudes_of(x))
    assert kept.exponents == {-24: 1, 0: 1}
    assert significant_entries(x).tolist() == [True, True, False, False, False]
    assert not significant_entries(torch.zeros(3)).any()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 50), st.floats(-40, 10))
def test_mask_and_histogram_keep_the_same_entries(seed: int, centre: float) -> None:
    x = gradients(seed, centre)
    assert significant(magnitudes_of(x)).nonzero == int(significant_entries(x).sum())
