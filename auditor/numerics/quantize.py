"""Fake quantization: rounds a tensor under a scheme as the scheme's library does, and converts it back to FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from .casting import round_in
from .formats import FORMATS
from .schemes import Element, Quantizer

_E4M3 = FORMATS["fp8_e4m3"]
_BIAS, _BITS = 127, 23
"""Exponent bias and fraction bits of float32."""


class Range(NamedTuple):
    """Smallest and largest value of every block, or of the calibration inputs, in FP32."""

    low: torch.Tensor
    high: torch.Tensor

    @property
    def magnitude(self) -> torch.Tensor:
        """The largest magnitude of every block."""
        return torch.maximum(self.high, -self.low)


class Scaled(NamedTuple):
    """Blocks divided by their scales. scale: factor that dequantizes the rounded elements. zero: zero point."""

    units: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None


Rule = Callable[[torch.Tensor, Range, Quantizer], Scaled]
"""A scale rule: divides blocks [r, R, c, C] by a scale per block, computed from their ranges [r, 1, c, 1]."""


def by_largest(x: torch.Tensor, span: Range, by: Quantizer) -> Scaled:
    """Scale rule: the largest magnitude becomes the largest element; a block of zeros has scale 0, and becomes NaN, unless
    the scale has a lower bound.

    Source: torchao 0.18, `_choose_scale_float8` and `_quantize_affine_float8` (without a lower bound for the scale).
    """
    scale = (span.magnitude / by.element.largest).clamp(min=by.least_scale)
    return Scaled(x / scale, scale)


def symmetric(x: torch.Tensor, span: Range, by: Quantizer, *, divides: bool = False) -> Scaled:
    """Scale rule: the largest magnitude becomes half the number of steps (127.5 of INT8), so that +127.5 saturates.

    divides: whether values are divided by the scale, as in compressed-tensors 0.20, or multiplied by its inverse: this
    decides to which side the largest magnitude of a row is rounded.

    Source: torchao 0.18, `choose_qparams_affine` with MappingType.SYMMETRIC, and `quantize_affine`.
    """
    magnitude = torch.maximum(span.high.clamp(min=0), -span.low.clamp(max=0))
    half_of_steps = (by.element.largest - by.element.least) / 2
    scale = (magnitude / half_of_steps).clamp(min=by.least_scale)
    units = x / scale if divides else x * (1.0 / scale)
    return Scaled(units, scale)


def narrow(x: torch.Tensor, span: Range, by: Quantizer) -> Scaled:
    """Scale rule: the largest magnitude becomes the largest integer (127 of INT8), so that nothing saturates.

    Source: ModelOpt 0.47, `_tensor_quant`, whose scale is the quotient's inverse, and 0 where the magnitude is at most
    2^-24.
    """
    largest = span.magnitude
    inverse = torch.where(largest <= 2.0**-24, 0.0, by.element.largest / largest)
    return Scaled(x * inverse, torch.where(inverse == 0, 1.0, 1.0 / inverse))


def asymmetric(x: torch.Tensor, span: Range, by: Quantizer, *, divides: bool = False) -> Scaled:
    """Scale rule: smallest and largest value become smallest and largest element; an integer zero point keeps 0 exact.
    divides: as in `symmetric`.

    Source: torchao 0.18, `choose_qparams_affine` with MappingType.ASYMMETRIC, and `quantize_affine`.
    """
    least = by.element.least
    largest = by.element.largest
    low = span.low.clamp(max=0)
    high = span.high.clamp(min=0)
    scale = ((high - low) / (largest - least)).clamp(min=by.least_scale)
    zero = (least - torch.round(low / scale)).clamp(least, largest)
    units = x / scale if divides else x * (1.0 / scale)
    return Scaled(units, scale, zero)


def power_of_two(x: torch.Tensor, span: Range, by: Quantizer, rounding: str) -> Scaled:
    """Scale rule in E8M0: the exponent of the largest magnitude minus the exponent of the format's largest element.

    rounding of the largest magnitude to a power of two: "floor", "ceil" or "even" (up if the element's rounding would
    carry). Source: OCP Microscaling Formats 1.0, section 6.3 (floor); torchao 0.18, `to_mx` with ScaleCalculationMode.
    As in torchao, the scale is at least 2^-126 in divisions, and 2^-127 in multiplications.
    """
    assert by.element.row is not None
    bits = span.magnitude.contiguous().view(torch.int32)
    if rounding == "even":
        bits = bits + (1 << (_BITS - by.element.row.mantissa - 1))
    exponent = ((bits >> _BITS) & 255) - _BIAS
    if rounding == "ceil":
        exponent = exponent + ((bits & ((1 << _BITS) - 1)) > 0)
    exponent = (exponent - by.element.top_exponent).clamp(-_BIAS, _BIAS + 1)
    return Scaled(x / _two_to(exponent.clamp(min=1 - _BIAS), span), _two_to(exponent, span))


def ratio_of_two(x: torch.Tensor, span: Range, by: Quantizer) -> Scaled:
    """Scale rule in E8M0: the quotient of the largest magnitude and the largest element, rounded up to a power of two.

    Source: cuBLAS documentation, "1D Block Quantization"; torchao 0.18, `_to_mx_rceil` (ScaleCalculationMode.RCEIL). As
    in torchao, values are not divided by the smallest scale, 2^-127.
    """
    exponent = torch.ceil(torch.log2(span.magnitude / by.element.largest)).clamp(-_BIAS, _BIAS)
    divisor = torch.where(exponent == -_BIAS, 0.0, exponent)
    return Scaled(x * _two_to(-divisor, span), _two_to(exponent, span))


def e4m3_scale(x: torch.Tensor, span: Range, by: Quantizer, levels: int) -> Scaled:
    """Scale rule: E4M3, from 2^-6 to 448. levels: 2 divides all scales of a tensor by one FP32 scale first.

    Source: torchao 0.18, `nvfp4_quantize` and `per_tensor_amax_to_scale`. A tensor of zeros becomes NaN in two levels.
    """
    block = span.magnitude / by.element.largest
    if levels == 1:
        scale = round_in(block.clamp(_E4M3.smallest_normal, _E4M3.largest), _E4M3)
        return Scaled(x * (1.0 / scale), scale)
    whole = span.magnitude.amax() / (_E4M3.largest * by.element.largest)
    scale = round_in((block / whole).clamp(_E4M3.smallest_normal, _E4M3.largest), _E4M3)
    return Scaled(x * ((1.0 / whole) / scale), whole * scale)


def _two_to(exponent: torch.Tensor, span: Range) -> torch.Tensor:
    """2 ** exponent; NaN for a block with NaN."""
    result = torch.pow(torch.full((), 2.0, device=exponent.device), exponent)
    return torch.where(torch.isnan(span.magnitude), math.nan, result)


RULES: Mapping[str, Rule] = {
    "largest": by_largest,
    "symmetric": symmetric,
    "narrow": narrow,
    "asymmetric": asymmetric,
    "symmetric_by_division": partial(symmetric, divides=True),
    "asymmetric_by_division": partial(asymmetric, divides=True),
    **{f"e8m0_{rounding}": partial(power_of_two, rounding=rounding) for rounding in ("floor", "ceil", "even")},
    "e8m0_rceil": ratio_of_two,
    "e4m3": partial(e4m3_scale, levels=1),
    "e4m3_two_levels": partial(e4m3_scale, levels=2),
}
"""{name in `Quantizer.rule`: scale rule}."""


def _round(x: torch.Tensor, zero: torch.Tensor | None, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest even and saturate. Returns the elements, minus the zero point, and a mask of saturated elements:
    where rounding without a limit would exceed the largest value, so that clamping adds an error of its own."""
    if element.row is not None:
        step = math.ldexp(1.0, element.top_exponent - element.row.mantissa)
        tie = element.largest + step / 2
        rounds_up = element.largest / step % 2 == 1  # a tie goes to the even neighbor
        beyond = x.abs() >= tie if rounds_up else x.abs() > tie
        clamped = x.clamp(-element.largest, element.largest)
        return round_in(clamped, element.row), beyond
    shift = torch.zeros((), device=x.device) if zero is None else zero
    units = torch.round(x)
    least = element.least - shift
    largest = element.largest - shift
    return units.clamp(least, largest), (units < least) | (units > largest)


@dataclass(frozen=True)
class Quantized:
    """A tensor after fake quantization, in FP32. beyond: mask of the entries that exceed the largest element.
    vanished: mask of the non-zero entries that became zero."""

    values: torch.Tensor
    beyond: torch.Tensor
    vanished: torch.Tensor


def fake_quantize(x: torch.Tensor, quantizer: Quantizer, span: tuple[float, float] | None = None) -> Quantized:
    """Quantize a tensor and dequantize it. Rows are all dimensions but the last; shapes: [*] -> [*].

    span: smallest and largest value of the calibration inputs, instead of the tensor's own. The last block of a row or
    column may be shorter, as if zeros followed.
    """
    x = x.detach().float()
    if not x.numel():
        return Quantized(x, x != x, x != x)
    last = x.shape[-1] if x.dim() else 1
    matrix = x.reshape(-1, last)
    rows, columns = matrix.shape
    height = quantizer.block[0] or rows
    width = quantizer.block[1] or columns
    padded = functional.pad(matrix, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, -1, width)  # [row blocks, height, column blocks, width]
    low = blocks.amin((1, 3), keepdim=True)
    high = blocks.amax((1, 3), keepdim=True)
    if span is not None:
        low = torch.full_like(low, span[0])
        high = torch.full_like(low, span[1])
    scaled = RULES[quantizer.rule](blocks, Range(low, high), quantizer)
    units, beyond = _round(scaled.units, scaled.zero, quantizer.element)

    def unblocked(entries: torch.Tensor) -> torch.Tensor:
        """Entries in blocks in the shape of `x`, without the padding."""
        return entries.view_as(padded)[:rows, :columns].reshape(x.shape)

    values = unblocked(units * scaled.scale)
    vanished = (values == 0) & (x != 0)
    return Quantized(values, unblocked(beyond), vanished)
