"""Accumulators of fewer bits than FP32, against models of them in exact integers and in Python's own half precision."""

import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from auditor.numerics.accumulators import SPLITS, rounded_sum, truncated_sum
from auditor.numerics.casting import round_to
from tests.support.subjects import normal


def exponent(x: Fraction) -> int:
    """The e with 2^(e - 1) <= |x| < 2^e; that of 0 is below all others."""
    result = -10_000
    if x:
        result = abs(x.numerator).bit_length() - x.denominator.bit_length() + 1
        result -= abs(x) < Fraction(2) ** (result - 1)
    return result


def truncated(terms: list[Fraction], bits: int, step: int) -> Fraction:
    """Integers in units of the last bit that is kept of the largest operand."""
    total = Fraction(0)
    for start in range(0, len(terms), step):
        operands = [total, *terms[start : start + step]]
        unit = Fraction(2) ** (max(map(exponent, operands)) - bits)
        total = sum(int(operand / unit) for operand in operands) * unit  # int() truncates
    return total


def in_half(terms: list[Fraction], step: int) -> Fraction:
    """`struct` rounds to half precision, to nearest even."""
    total = Fraction(0)
    for start in range(0, len(terms), step):
        (half,) = struct.unpack("<e", struct.pack("<e", float(total + sum(terms[start : start + step]))))
        total = Fraction(half)
    return total


def products(k: int, format: str) -> Tensor:
    """Products of numbers of a format, exact in FP64: [k, 8]."""
    x, y = (round_to(normal(k, 8, seed=seed), format).double() for seed in (1, 2))
    return x * y


@pytest.mark.parametrize(
    ("sum_of", "model", "format"),
    [
        (lambda x: truncated_sum(x, 14, 32), lambda x: truncated(x, 14, 32), "fp8_e4m3"),
        (lambda x: truncated_sum(x, 10, 4), lambda x: truncated(x, 10, 4), "fp8_e4m3"),
        (lambda x: rounded_sum(x, "fp16", 16), lambda x: in_half(x, 16), "fp16"),
        (lambda x: rounded_sum(x, "fp16"), lambda x: in_half(x, -(-len(x) // SPLITS)), "fp16"),
    ],
)
@pytest.mark.parametrize("k", [1, 31, 300])
def test_each_is_the_integer_model_of_it(
    sum_of: Callable[[Tensor], Tensor], model: Callable[[list[Fraction]], Fraction], format: str, k: int
) -> None:
    terms = products(k, format)
    expected = [float(model([Fraction(x) for x in column])) for column in terms.T.tolist()]
    assert sum_of(terms).tolist() == expected
    if k == 300:
        assert expected != terms.sum(0).tolist()


def test_a_large_accumulator_swallows_halves_until_it_is_promoted() -> None:
    """8192 = 2^13 in 14 bits has units of 1. Without promotion all of 255 halves are lost; else those of one block."""
    terms = torch.tensor([8192.0, *[0.5] * 255], dtype=torch.float64).unsqueeze(1)
    assert truncated_sum(terms, 14, 32).item() == 8192
    assert truncated_sum(terms, 14, 32, promoted=128).item() == 8192 + 128 * 0.5
    # FP16 has units of 8 there: 15 halves round up to 8, and each of 15 times 16 halves is 8
    assert rounded_sum(terms, "fp16", 16).item() == 8192 + 8 + 15 * 8
