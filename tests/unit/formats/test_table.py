"""The table of formats against what torch itself says of the same types."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.formats.table import BY_DTYPE, FORMATS, LOW_DTYPES

STORED = [name for name, fmt in FORMATS.items() if fmt.dtype is not None]


@pytest.mark.parametrize("name", STORED)
def test_rows_agree_with_torch(name: str) -> None:
    fmt = FORMATS[name]
    info = torch.finfo(fmt.dtype)
    assert fmt.largest == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.epsilon == info.eps


@pytest.mark.parametrize("name", STORED)
def test_smallest_subnormal_is_the_first_value_above_zero(name: str) -> None:
    fmt = FORMATS[name]
    smallest = torch.tensor(fmt.smallest_subnormal, dtype=torch.float64)
    assert float(smallest.to(fmt.dtype).double()) == fmt.smallest_subnormal
    assert float((smallest / 2).to(fmt.dtype).double()) == 0.0  # the tie between 0 and 1 goes to the even one, 0


def test_what_lies_beyond_the_largest() -> None:
    assert {name: fmt.overflows_to for name, fmt in FORMATS.items()} == {
        "fp32": "inf",
        "tf32": "inf",
        "bf16": "inf",
        "fp16": "inf",
        "fp8_e4m3": "largest",
        "fp8_e5m2": "inf",
    }


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    tf32 = FORMATS["tf32"]
    assert tf32.epsilon == FORMATS["fp16"].epsilon == 2.0**-10
    assert tf32.smallest_normal == FORMATS["fp32"].smallest_normal == 2.0**-126
    assert tf32.largest == (2 - 2.0**-10) * 2.0**127  # all ten fraction bits set, largest exponent


def test_headroom_in_doublings() -> None:
    fp16 = FORMATS["fp16"]
    assert fp16.headroom_bits(16376.0) == pytest.approx(2.0)  # 65504 / 16376 = 4
    assert fp16.headroom_bits(2 * 65504.0) == pytest.approx(-1.0)
    assert fp16.headroom_bits(0.0) == math.inf
    assert fp16.headroom_bits(math.inf) == -math.inf


def test_formats_are_found_by_dtype() -> None:
    assert {BY_DTYPE[dtype].name for dtype in LOW_DTYPES} == {"fp16", "bf16"}
    assert len(BY_DTYPE) == len(STORED)  # no two rows share a dtype
