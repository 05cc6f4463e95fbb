"""Rounding against an independent one: written from the table's numbers alone, and TF32 worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auditor.numerics.casting import round_to
from auditor.numerics.formats import FORMATS, Format, registered

NARROW = ["tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]
FP32_BITS = st.integers(0, 2**32 - 1)


def rounded_by_table(x: Tensor, fmt: Format) -> Tensor:
    """Nearest even multiple of the spacing at x, in float64, where every step below is exact."""
    wide = x.double()
    exponent = (torch.frexp(wide.abs())[1] - 1).clamp_min(fmt.min_exponent)
    nearest = torch.ldexp(torch.ldexp(wide, fmt.mantissa - exponent).round(), exponent - fmt.mantissa)
    beyond = torch.sign(wide) * (math.inf if fmt.overflows_to == "inf" else fmt.largest)
    finite = torch.where(nearest.abs() > fmt.largest, beyond, nearest)
    return torch.where(torch.isfinite(wide), finite, torch.where(torch.isnan(wide), wide, beyond)).float()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is torch.float32
    same = (actual == expected) & (torch.signbit(actual) == torch.signbit(expected))
    assert bool((same | (actual.isnan() & expected.isnan())).all())


def from_bits(*patterns: int) -> Tensor:
    """FP32 values of 32-bit patterns."""
    signed = [pattern - 2**32 if pattern >= 2**31 else pattern for pattern in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit type, as FP32."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_every_value_of_a_format_is_a_fixed_point(name: str, dtype: torch.dtype) -> None:
    values = every_pattern(dtype)
    assert_same(round_to(values, name), values)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_table_predicts_every_16_bit_value(name: str, dtype: torch.dtype) -> None:
    values = every_pattern(dtype)
    assert_same(round_to(values, name), rounded_by_table(values, FORMATS[name]))


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_ties_between_neighbours_go_to_the_even_one(name: str, dtype: torch.dtype) -> None:
    lower = torch.arange(0, 2**15 - 1).to(torch.int16)
    below, above = lower.view(dtype).double(), (lower + 1).view(dtype).double()
    kept = torch.isfinite(above)
    middle = ((below + above) / 2)[kept].float()  # one bit more than the format has: exact in FP32
    even = torch.where(lower % 2 == 0, below, above)[kept].float()
    assert_same(round_to(middle, name), even)


@settings(deadline=None, derandomize=True)
@given(bits=FP32_BITS, exponent_bits=st.integers(2, 8), mantissa=st.integers(1, 15))
def test_the_numbers_of_any_format_predict_any_fp32_value(bits: int, exponent_bits: int, mantissa: int) -> None:
    x = from_bits(bits)
    with registered(Format.ieee("e0m0", exponent_bits, mantissa)) as fmt:
        assert_same(round_to(x, "e0m0"), rounded_by_table(x, fmt))


@pytest.mark.parametrize(("name", "exponent_bits", "mantissa"), [("fp16", 5, 10), ("bf16", 8, 7)])
def test_rounding_by_the_numbers_is_the_rounding_of_torch(name: str, exponent_bits: int, mantissa: int) -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, x * 2.0**-20, x * 2.0**14, from_bits(0, 1, 0x7F800000, 0x7F7FFFFF)])
    with registered(Format.ieee("e0m0", exponent_bits, mantissa)):
        assert_same(round_to(x, "e0m0"), round_to(x, name))


@pytest.mark.parametrize("name", NARROW)
@settings(deadline=None, derandomize=True)
@given(bits=FP32_BITS)
def test_the_table_predicts_any_fp32_value(name: str, bits: int) -> None:
    x = from_bits(bits)
    assert_same(round_to(x, name), rounded_by_table(x, FORMATS[name]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-10, 1 + 2**-10),  # the last fraction bit that is kept
        (1 + 2**-11, 1.0),  # a tie between 1 and 1 + 2^-10: fraction 0 is even
        (1 + 3 * 2**-11, 1 + 2 * 2**-10),  # a tie between fractions 1 and 2: 2 is even
        (1 + 2**-11 + 2**-23, 1 + 2**-10),  # just above the tie
        (-(1 + 2**-11 + 2**-23), -(1 + 2**-10)),
        (2 - 2**-23, 2.0),  # carries into the exponent
        (3 * 2.0**-137, 2 * 2.0**-136),  # subnormal spacing 2^-136; 1.5 of it is a tie, 2 is even
        (2.0**-137, 0.0),  # half of it: 0 is even
        (2.0**-149, 0.0),
        (3.4028234663852886e38, math.inf),  # (2 - 2^-23) * 2^127 rounds up to 2^128
        (-3.4028234663852886e38, -math.inf),
        ((2 - 2**-10) * 2.0**127, (2 - 2**-10) * 2.0**127),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (math.nan, math.nan),
        (-0.0, -0.0),
    ],
)
def test_tf32_by_hand(value: float, expected: float) -> None:
    assert_same(round_to(torch.tensor([value]), "tf32"), torch.tensor([expected]))


def test_tf32_keeps_a_nan_whose_fraction_lies_in_the_dropped_bits() -> None:
    assert bool(round_to(from_bits(0x7F800001, 0xFF800001), "tf32").isnan().all())


def test_shapes_and_strides_survive() -> None:
    x = torch.arange(12.0).reshape(3, 4).t() / 3
    assert torch.equal(round_to(x, "tf32"), round_to(x.contiguous(), "tf32"))
    assert round_to(torch.empty(0, 3), "tf32").shape == (0, 3)
    assert round_to(torch.tensor(1 / 3), "tf32").shape == ()


def test_fp32_is_left_alone() -> None:
    x = torch.tensor([1 / 3, 1e-45])
    assert torch.equal(round_to(x, "fp32"), x)
