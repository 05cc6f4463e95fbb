"""Magnitudes of tensors, against the plain definitions and against what the formats really do."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auditor.errors import MeasureError
from auditor.numerics.formats import FORMATS, Format
from auditor.numerics.histogram import (
    Deviation,
    Profile,
    largest_scale,
    magnitudes_of,
    merge_magnitudes,
    significant,
    subnormal_share,
    underflow_share,
)
from auditor.numerics.metrics import disagreement, output_error, relative_l2, sqnr_db
from auditor.records import Magnitudes
from tests.support.refusing import refused
from tests.support.subjects import normal

LOW = ["fp16", "bf16"]
INF, NAN = math.inf, math.nan
numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


def magnitudes(x: torch.Tensor) -> Magnitudes:
    """What a profile says of a tensor's magnitudes."""
    return Profile(x).range


def test_a_tensor_worked_out_by_hand() -> None:
    profile = Profile(torch.tensor([[0.0, -3.0, 0.75], [0.5, 2.0, 0.0]]))
    # |x|: 3 = 1.5 * 2^1, 0.75 = 1.5 * 2^-1, 0.5 = 2^-1, 2 = 2^1; two of six are zero; squares: 9, 9/16, 1/4, 4
    norm = pytest.approx(math.sqrt(13.8125))
    assert profile.range == Magnitudes(max_abs=3.0, min_abs=0.5, zeros=2, exponents={-1: 2, 1: 2}, norm=norm)
    assert profile.range.nonzero == 4
    assert profile.rms == pytest.approx(math.sqrt(13.8125 / 6))
    assert Profile(torch.empty(0)).rms == 0.0


def test_non_finite_entries_are_left_out() -> None:
    span = magnitudes(torch.tensor([math.inf, -math.inf, math.nan, 4.0, 0.0]))
    assert span == Magnitudes(max_abs=4.0, min_abs=4.0, zeros=1, exponents={2: 1}, nonfinite=3, norm=4.0)


def test_a_tensor_inside_autograd_in_half_and_with_strides() -> None:
    assert magnitudes(torch.tensor([2.0], requires_grad=True) * 3).max_abs == 6.0
    assert magnitudes(torch.tensor([65504.0], dtype=torch.float16)).exponents == {15: 1}
    assert magnitudes(torch.arange(6.0).reshape(2, 3).t()[1:]).zeros == 0  # without the row that holds 0


@settings(deadline=None, derandomize=True)
@given(st.lists(numbers, max_size=20))
def test_any_range_against_a_count(values: list[float]) -> None:
    span = magnitudes(torch.tensor(values, dtype=torch.float32))
    sizes = [abs(value) for value in values if math.isfinite(value)]
    nonzero = [size for size in sizes if size > 0]
    assert span.max_abs == max(nonzero, default=0.0)
    assert span.min_abs == min(nonzero, default=0.0)
    assert span.zeros == sizes.count(0.0)
    assert sum(span.exponents.values()) == len(nonzero)
    assert all(2.0**power <= max(nonzero) for power in span.exponents if power > -127)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def defined(reference: torch.Tensor, candidate: torch.Tensor, fmt: Format) -> Deviation:
    """The same entry by entry, in Python's own numbers, but for the error."""
    pairs = list(zip(reference.tolist(), candidate.double().tolist(), strict=True))
    regular = [(r, c) for r, c in pairs if r and math.isfinite(r)]
    gone = sum(c == 0 for _, c in regular) / max(len(regular), 1)
    small = sum(0 < abs(c) < fmt.smallest_normal for _, c in regular) / max(len(regular), 1)

    def steps(r: float, c: float) -> float:
        power = max(2.0 ** (math.frexp(r)[1] - 1) if r else 0.0, fmt.smallest_normal)
        fits = math.isfinite(c) and max(abs(c - r), abs(c - r) / power) <= torch.finfo(torch.float32).max
        return abs(c - r) / power / fmt.epsilon if fits else INF

    return Deviation(
        Profile(reference).error(candidate),
        sum(math.isinf(c) for r, c in pairs if math.isfinite(r)),
        sum(math.isnan(c) for r, c in pairs if math.isfinite(r)),
        gone,
        small,
        max((steps(r, c) for r, c in pairs if math.isfinite(r)), default=0.0),
    )


@pytest.mark.parametrize("name", LOW)
@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(numbers, numbers), max_size=12))
def test_any_two_tensors_against_the_definitions(name: str, pairs: list[tuple[float, float]]) -> None:
    fmt = FORMATS[name]
    r, c = t(*(a for a, _ in pairs)), t(*(b for _, b in pairs)).to(fmt.dtype)
    for candidate in (c, r.to(fmt.dtype)):
        got, wanted = Profile(r).deviation(candidate, fmt), defined(r, candidate, fmt)
        assert replace(got, error=0.0, max_ulp=0.0) == replace(wanted, error=0.0, max_ulp=0.0)
        assert got.error == pytest.approx(wanted.error, rel=1e-6)
        assert got.max_ulp == pytest.approx(wanted.max_ulp, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LOW)
def test_what_shrank_is_counted_in_any_dtype(name: str, dtype: torch.dtype) -> None:
    # An operation may return float32 although its inputs were low.
    sizes = torch.logspace(-9, 4, 4000) * torch.tensor([1.0, -1.0]).repeat(2000)
    candidate = torch.where(sizes.abs() < 1e-7, torch.zeros(()), sizes * 0.4).to(dtype)
    found = Profile(sizes).deviation(candidate, FORMATS[name])
    wanted = defined(sizes, candidate, FORMATS[name])
    assert (found.underflow, found.subnormal) == (wanted.underflow, wanted.subnormal)
    assert found.underflow > 0


@pytest.mark.parametrize("name", LOW)
def test_the_largest_step_of_a_rounding_is_found_in_any_chunk(name: str) -> None:
    # Whole numbers are exact but for a tie in the third chunk, and a smaller step after it.
    fmt, x = FORMATS[name], torch.ones(5 * 2**17)
    x[2 * 2**17 + 7], x[4 * 2**17 + 9] = 1 + fmt.epsilon / 2, 1 + fmt.epsilon / 4
    found = Profile(x).rounding(fmt)
    assert found.max_ulp == 0.5
    assert found.error == pytest.approx(relative_l2(x, x.to(fmt.dtype)), rel=1e-4)


def test_chunks_add_up_in_quadrature() -> None:
    # 30 in one chunk and 40 in the next: the norm is 50. They are off by 3 and by 4: together by 5, a tenth of it.
    reference = torch.zeros(2 * 2**17)
    reference[5], reference[-5] = 30.0, 40.0
    candidate = (reference * 1.1).round()
    profile = Profile(reference)
    assert profile.range.norm == 50.0
    assert profile.error(candidate) == pytest.approx(0.1)
    assert profile.deviation(candidate, FORMATS["fp16"]).error == pytest.approx(0.1)


@pytest.mark.parametrize("numbers", [2**17 - 1, 2**17, 2**17 + 1, 2**18 + 3, 2**19 + 2**17 + 5])
def test_exponents_of_many_numbers_are_counted_one_by_one(numbers: int) -> None:
    x = torch.ldexp(normal(numbers), torch.arange(numbers) % 250 - 125)
    x[::7] = 0.0
    found = magnitudes(x)
    powers = torch.frexp(x[x != 0]).exponent - 1
    powers, counts = powers.clamp(min=-127).unique(return_counts=True)
    assert found.exponents == dict(zip(powers.tolist(), counts.tolist(), strict=True))
    assert found.zeros == int((x == 0).sum())


# Histograms of gradients, against what the formats really do to the same numbers.


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
    assert underflow_share(exponents, FORMATS["fp16"], shift) == pytest.approx(lost)
    assert subnormal_share(exponents, FORMATS["fp16"], shift) == pytest.approx(float(low.double().mean()), abs=2 / 500)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.floats(-40, 10))
def test_the_largest_scale_is_the_last_that_does_not_overflow(seed: int, centre: float) -> None:
    x = gradients(seed, centre)
    scale = largest_scale(magnitudes_of(x), FORMATS["fp16"])
    assert bool(torch.isfinite((x.double() * scale).to(torch.float16)).all())
    assert not bool((x.double().abs() * 2 * scale <= 65504).all())


def test_nothing_and_zeros_have_an_answer() -> None:
    for x in (torch.zeros(0), torch.zeros(3)):
        spread = magnitudes_of(x)
        assert underflow_share(spread.exponents, FORMATS["fp16"]) == 0.0
        assert largest_scale(spread, FORMATS["fp16"]) == float("inf")


def test_merging_is_the_histogram_of_both() -> None:
    a, b = gradients(1, -10), gradients(2, -20)
    both, apart = magnitudes_of(torch.cat((a, b))), merge_magnitudes([magnitudes_of(a), magnitudes_of(b)])
    assert both.exponents == apart.exponents
    assert both.norm == pytest.approx(apart.norm)
    assert both.rounding["bf16"] == pytest.approx(apart.rounding["bf16"], rel=0.05)


def test_merging_counts_what_is_no_magnitude_and_keeps_both_ends() -> None:
    a, b = torch.tensor([0.0, 3.0, float("inf")]), torch.tensor([0.0, 0.0, 0.25, float("nan")])
    found = merge_magnitudes([magnitudes_of(a), magnitudes_of(torch.zeros(1)), magnitudes_of(b)])
    assert (found.zeros, found.nonfinite, found.nonzero) == (4, 2, 2)
    assert (found.min_abs, found.max_abs) == (0.25, 3.0)
    assert merge_magnitudes([]).min_abs == 0.0


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


# Error metrics, each answer worked out beside it.


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (t(3, 4), t(3, 4), 0.0),
        (t(3, 4), t(3, 4.5), 0.1),  # 0.5 / 5
        (t(3, 4), t(0, 0), 1.0),
        (t(0, 0), t(0, 0), 0.0),
        (t(0, 0), t(0, 1e-30), INF),
        (torch.empty(0), torch.empty(0), 0.0),
        (t(1, 2), t(NAN, 2), INF),
        (t(1, 2), t(INF, 2), INF),
        (t(1, 2), t(1, -INF), INF),
        (t(-INF, 3, 4), t(-INF, 3, 4.5), 0.1),  # a mask: the infinity is equal, the rest is 0.5 / 5
        (t(-INF, 3, 4), t(INF, 3, 4), INF),
        (t(-INF, 3, 4), t(-65504, 3, 4), INF),
        (t(-INF, 3, 4), t(NAN, 3, 4), INF),
        (t(NAN, 3, 4), t(7, 3, 4.5), 0.1),  # no reference, no error
        (t(-INF, 3), t(-INF, NAN), INF),
        (t(-INF, -INF), t(-INF, -INF), 0.0),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 4.5j]), 0.1),
    ],
)
def test_relative_l2(reference: Tensor, candidate: Tensor, expected: float) -> None:
    assert relative_l2(reference, candidate) == pytest.approx(expected, rel=1e-12)


def test_squares_that_float32_does_not_hold_are_summed_up_in_float64() -> None:
    # 1e25^2 = 1e50 overflows FP32; the error is 1e24 / 1e25 up to the rounding of the inputs
    assert relative_l2(t(1e25), t(1.1e25)) == pytest.approx(0.1, rel=1e-5)
    assert relative_l2(t(1e-25), t(1.1e-25)) == pytest.approx(0.1, rel=1e-5)
    # 1000.5 is a value of fp16 (spacing 0.5), and 0.5 / 1000 = 5e-4
    assert relative_l2(t(1000).half(), t(1000.5).half()) == pytest.approx(5e-4)


@pytest.mark.parametrize("step", [1, 2])
def test_large_tensors_are_compared_in_runs(step: int) -> None:
    x = normal(3 * (1 << 17) + 6).view(2, -1).T[:, ::step]
    y = x.half().contiguous()  # with other strides
    expected = float((x.double() - y.double()).square().sum().sqrt() / x.double().square().sum().sqrt())
    assert relative_l2(x, y) == pytest.approx(expected, rel=1e-5)
    broken = y.clone()
    broken[-1] = math.inf
    assert relative_l2(x, broken) == math.inf
    both = x.clone()
    both[-1] = math.inf
    assert relative_l2(both, broken) == pytest.approx(relative_l2(x[:-1], y[:-1]), rel=1e-5)


def test_several_outputs_are_one_vector() -> None:
    # ||(0, 0.5, 0)|| / ||(3, 4, 12)|| = 0.5 / 13
    assert output_error([t(3, 4), t(12)], [t(3, 4.5), t(12)]) == pytest.approx(0.5 / 13)
    assert output_error([], []) == 0.0


def test_discrete_outputs_count_by_the_share_that_differs() -> None:
    indices = torch.tensor([1, 2, 3, 4])
    flipped = torch.tensor([1, 2, 3, 5])
    assert output_error([t(3, 4), indices], [t(3, 4), flipped]) == 0.25
    assert output_error([t(3, 4), indices], [t(3, 9), flipped]) == 1.0  # 5 / 5 outweighs 0.25
    assert output_error([torch.tensor([True, False])], [torch.tensor([True, True])]) == 0.5
    assert disagreement(indices, flipped) == 0.25
    assert disagreement(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)) == 0.0


@pytest.mark.parametrize(
    ("reference", "candidate"), [([t(1, 2)], [t(1)]), ([t(1)], []), ([t(1, 2)], [t(1, 2).reshape(1, 2)])]
)
def test_shapes_must_agree(reference: list[Tensor], candidate: list[Tensor]) -> None:
    with refused(MeasureError, "shape-mismatch"):
        output_error(reference, candidate)


def test_decibels() -> None:
    assert sqnr_db(0.1) == pytest.approx(20.0)
    assert sqnr_db(10.0) == pytest.approx(-20.0)
    assert sqnr_db(0.0) == INF
    assert sqnr_db(INF) == -INF
    assert sqnr_db(NAN) == -INF
