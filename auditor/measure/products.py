"""Splits the error of a matrix product or convolution: rounding of its inputs, accumulation, rounding of its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..numerics.casting import format_in, like, plain, round_tree, widen
from ..numerics.entries import is_plain
from ..numerics.formats import FORMATS
from ..numerics.kernels import run_op
from ..numerics.metrics import sum_of_squares
from ..numerics.nodes import operation_of
from ..records import ProductError
from ..trees import over_tensors, tensors_in

SAMPLE = 64
"""Number of rows and columns of a product that are computed again, in FP32 and FP64."""


def split_product(target: Callable[..., Any], wide: tuple[Any, ...], low: tuple[Any, ...]) -> ProductError | None:
    """The three parts of a product's error, and the whole; None if its tensors are not plain, or an error is not finite.

    wide, low: the arguments in FP32, and rounded to the format. Formula: with r the product of the FP32 inputs in FP64, a
    that of the rounded inputs in FP64, b in the accumulator's precision and c in the format: ||a - r||, ||b - a||, ||c -
    b|| and ||c - r||, each divided by ||r||. On a GPU, b is not visible, and the squares of the last two parts add up to
    ||c - a||^2. Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.5.
    """
    if not all(is_plain(x) for x in tensors_in((wide, low))):
        return None
    row = next((row for x in tensors_in(low) if (row := format_in(x)) is not None), FORMATS["fp32"])
    wide, low = sample(target, wide), round_tree(sample(target, low), row)  # a part of a tensor has no tag
    r, a = (target(*over_tensors(_in_fp64, given)) for given in (wide, low))
    c = run_op(target, low, {})
    if c.device.type == "cpu":
        b = target(*widen(low)).double()
        accumulation, output = sum_of_squares(b - a), sum_of_squares(_in_fp64(c) - b)
    else:
        output = sum_of_squares(_in_fp64(like(a.float(), c)) - a)
        accumulation = max(sum_of_squares(_in_fp64(c) - a) - output, 0.0)
    squares = sum_of_squares(a - r), accumulation, output, sum_of_squares(_in_fp64(c) - r)
    size = sum_of_squares(r)
    parts = [math.sqrt(square / size) if size else math.inf for square in squares]
    return ProductError(*parts) if all(map(math.isfinite, parts)) else None


def _in_fp64(x: Tensor) -> Tensor:
    return plain(x).double() if x.is_floating_point() else x


def sample(target: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for some rows and columns of the result; for convolutions, part of one image and some channels."""
    row, bias = operation_of(target), args[2] if len(args) > 2 else None
    if row.gemm == "linear":
        x = args[0].reshape(-1, args[0].shape[-1])
        return (_some(x), _some(args[1]), *(None if bias is None else _some(bias) for _ in args[2:3]))
    if row.gemm == "convolution" and args[0].dim() == args[1].dim():
        whole = args[0].shape[1] == args[1].shape[1]  # not split into groups
        w, *rest = [x if x is None or not whole else _some(x) for x in (args[1], *args[2:3])]
        return (_crop(args[0][:1], w, args[5] if len(args) > 5 else 1), w, *rest, *args[3:])
    if row.flops == "product" and args[1].dim() == 2 <= args[0].dim():
        return _some(args[0].reshape(-1, args[0].shape[-1])), _some(args[1].T).T
    if row.flops == "product" and args[0].dim() == args[1].dim() > 2 and args[0].shape[0] == args[1].shape[0]:
        return args[0][:1], args[1][:1]
    if row.flops == "added_product" and [x.dim() for x in args[:3]] == [1, 2, 2]:
        return _some(args[0]), _some(args[1]), _some(args[2].T).T, *args[3:]
    return args


def _crop(x: Tensor, weight: Tensor, dilation: Any) -> Tensor:
    """The middle of an image: at least SAMPLE / 4 entries of each spatial dimension, and as many as a kernel reads."""
    spread = max(dilation) if isinstance(dilation, list | tuple) else int(dilation)
    for dim in range(2, x.dim()):
        keep = min(x.shape[dim], max(SAMPLE // 4, spread * weight.shape[dim]))
        x = x.narrow(dim, (x.shape[dim] - keep) // 2, keep)
    return x


def _some(x: Tensor) -> Tensor:
    """At most SAMPLE entries of the first dimension, evenly spaced."""
    return x[:: max(len(x) // SAMPLE, 1)][:SAMPLE]
