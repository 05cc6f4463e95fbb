"""Fourier transforms in float16: powers of two, in float32 and rounded, whatever names the lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from auditor.numerics.formats import FORMATS
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.numerics.scans import fourier_transform

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

aten = torch.ops.aten
REAL, PAIRS = torch.arange(8.0).half(), torch.view_as_complex(torch.arange(16.0).half().view(8, 2))
SQUARE = torch.ones(6, 8).half()


@pytest.mark.parametrize(
    ("op", "args", "lengths"),
    [
        (aten.fft_fft.default, (REAL,), [8]),
        (aten.fft_fft.default, (REAL, 5), [5]),
        (aten.fft_fft.default, (PAIRS, 16), [16]),
        (aten.fft_rfft.default, (REAL,), [8]),
        (aten.fft_rfft.default, (REAL, 6), [6]),
        (aten.fft_irfft.default, (PAIRS,), [14]),
        (aten.fft_irfft.default, (PAIRS, 16), [16]),
        (aten.fft_hfft.default, (PAIRS, 8), [8]),
        (aten.fft_ihfft.default, (REAL,), [8]),
        (aten.fft_rfft2.default, (SQUARE,), [6, 8]),
        (aten.fft_rfft2.default, (SQUARE, [4, 4]), [4, 4]),
        (aten.fft_rfftn.default, (SQUARE, None, [0]), [6]),
        (aten.fft_fftn.default, (SQUARE, [16]), [16]),
        (aten.fft_fftn.default, (SQUARE,), [6, 8]),
        (aten._fft_r2c.default, (SQUARE, [1], 0, True), [8]),
        (aten._fft_c2c.default, (PAIRS, [0], 0, True), [8]),
        (aten._fft_c2r.default, (PAIRS, [0], 0, 14), [14]),
    ],
)
def test_the_lengths_that_are_transformed(op: Any, args: tuple[Any, ...], lengths: list[int]) -> None:
    result, found = fourier_transform(op, args, {}, FORMATS["fp16"])
    assert found == lengths
    wide = [
        x.to(torch.complex64 if x.is_complex() else torch.float32) if isinstance(x, torch.Tensor) else x for x in args
    ]
    exact = op(*wide)
    assert result.dtype is (torch.complex32 if exact.is_complex() else torch.float16)
    assert torch.equal(result.to(exact.dtype), exact.to(result.dtype).to(exact.dtype))


def test_other_lengths_are_refused_in_float16_and_all_in_bfloat16() -> None:
    assert run_op(aten.fft_fft.default, (REAL,), {}).dtype is torch.complex32
    with pytest.raises(UnsupportedInFormat, match="fft_fft has no float16 kernel on CUDA for a length of 12, no power"):
        run_op(aten.fft_fft.default, (REAL, 12), {})
    with pytest.raises(UnsupportedInFormat, match="fft_fft has no bfloat16 kernel on CUDA"):
        run_op(aten.fft_fft.default, (REAL.bfloat16(),), {})
    with pytest.raises(UnsupportedInFormat, match="a length of 14"):
        run_op(aten.fft_irfft.default, (PAIRS,), {})


def test_a_coefficient_that_is_too_large_overflows() -> None:
    spectrum = run_op(aten.fft_rfft.default, (torch.full((1024,), 100.0).half(),), {})
    assert math.isinf(torch.view_as_real(spectrum)[0, 0].item())


def test_float32_and_shifts_are_as_they_are() -> None:
    x = torch.arange(6.0)
    assert torch.equal(run_op(aten.fft_rfft.default, (x,), {}), torch.fft.rfft(x))
    assert run_op(aten.fft_fftshift.default, (x.bfloat16(),), {}).tolist() == [3, 4, 5, 0, 1, 2]
