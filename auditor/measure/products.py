"""The error of a matrix product or convolution, on a sample: by cause, and under flags that change its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..errors import let_through
from ..numerics.accumulators import rounded_sum, truncated_sum
from ..numerics.casting import like, plain, round_to, round_tree, widen
from ..numerics.entries import is_plain, over_tensors, tensors_in
from ..numerics.formats import FORMATS, Format
from ..numerics.fp32_output import FACTORS
from ..numerics.kernels import is_tensor_core, run_op
from ..numerics.metrics import relative_l2, sum_of_squares
from ..numerics.nodes import operation_of, row_of, target_of
from ..records import Capture, Contribution, NodeError, ProductError

SAMPLE = 64
"""Number of rows and columns of a product that are computed again, in FP32 and FP64."""


class Flag(NamedTuple):
    """A flag that changes a product's arithmetic. of: the kind of operation. reads: format of the factors; for an 8-bit
    format, these are first scaled to its range. sum: emulates the accumulator; None: the accumulator is FP32, and only
    the rounding of the factors counts."""

    of: str
    reads: str
    sum: Callable[[Tensor], Tensor] | None = None


_14_BITS = partial(truncated_sum, bits=14, step=32)
FLAGS: Mapping[str, Flag] = {
    "cuda.matmul.allow_tf32": Flag("product", "tf32"),
    "cudnn.allow_tf32, convolutions": Flag("convolution", "tf32"),
    "cudnn.allow_tf32, recurrent layers": Flag("recurrent", "tf32"),
    "allow_fp16_accumulation": Flag("product", "fp16", partial(rounded_sum, format="fp16", step=16)),
    "allow_fp16_reduced_precision_reduction": Flag("product", "fp16", partial(rounded_sum, format="fp16")),
    "allow_bf16_reduced_precision_reduction": Flag("product", "bf16", partial(rounded_sum, format="bf16")),
    "FP8 sums in 14 bits": Flag("product", "fp8_e4m3", _14_BITS),
    "FP8 sums in 14 bits, in FP32 after 128 terms": Flag("product", "fp8_e4m3", partial(_14_BITS, promoted=128)),
}


@dataclass(frozen=True)
class Sample:
    """Some rows and columns of a product. args: FP32 arguments for only these. exact: the result in FP64."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    exact: Tensor

    def split(self, row: Format) -> ProductError | None:
        """Errors from rounded inputs, accumulation and rounded output, and the total; None if an error is not finite.

        Formula: with r = exact, a the product of the rounded inputs in FP64, b in the accumulator's precision and c in the
        format: ||a - r||, ||b - a||, ||c - b|| and ||c - r||, each divided by ||r||. On a GPU, b is not visible, and the
        squares of accumulation and output add up to ||c - a||^2. Source: Higham, Accuracy and Stability of Numerical
        Algorithms, section 3.5.
        """
        low = round_tree(self.args, row)
        a = self.target(*over_tensors(_in_fp64, low))
        if a.device.type == "cpu":
            accumulated = self.target(*widen(low))
            b = accumulated.double()
            c = _in_fp64(round_tree(accumulated, row))
            accumulation = sum_of_squares(b - a)
            output = sum_of_squares(c - b)
        else:
            result = run_op(self.target, low, {})
            c = _in_fp64(result)
            rounded = _in_fp64(like(a.float(), result))
            output = sum_of_squares(rounded - a)
            accumulation = max(sum_of_squares(c - a) - output, 0.0)
        inputs = sum_of_squares(a - self.exact)
        total = sum_of_squares(c - self.exact)
        size = sum_of_squares(self.exact)
        errors = list[float]()
        for square in (inputs, accumulation, output, total):
            errors.append(math.sqrt(square / size) if size else math.inf)
        return ProductError(*errors) if all(map(math.isfinite, errors)) else None

    def flag_errors(self) -> dict[str, float]:
        """{flag: relative L2 error of the product with only this flag on}, for flags that affect the product; of a flag
        that changes the accumulator, the error of SAMPLE entries."""
        known = operation_of(self.target)
        factors = FACTORS.get(known.packet, (0, 1))  # positions of the arguments that are multiplied
        kind = "product" if known.packet in FACTORS else known.gemm
        errors = dict[str, float]()
        for name, flag in FLAGS.items():
            if flag.of != kind:
                continue
            if flag.sum is None:
                given = [round_to(x, flag.reads) if i in factors else x for i, x in enumerate(self.args)]
                errors[name] = relative_l2(self.exact, self.target(*over_tensors(_in_fp64, given)))
            else:
                terms = self._terms(factors, FORMATS[flag.reads])
                errors[name] = relative_l2(terms.sum(0), flag.sum(terms))
        return errors

    def _terms(self, factors: tuple[int, int], row: Format) -> Tensor:
        """The products that are added up for SAMPLE entries of the result, with factors in a format. Shape: [k, SAMPLE]."""
        first, second = factors
        x = self.args[first]
        y = self.args[second]
        if operation_of(self.target).gemm != "linear" and y.dim() != 1:
            y = y.mT
        x = _first_matrix(x)  # [m, k]
        y = _first_matrix(y)  # [n, k]
        # Entry i is in row i % m and column (i + i // m) % n, so that the entries lie all over the result.
        entry = torch.arange(SAMPLE, device=x.device)
        x_of_entry = x[entry % len(x)]  # [SAMPLE, k]
        y_of_entry = y[(entry + entry // len(x)) % len(y)]  # [SAMPLE, k]
        if row.bytes == 1:
            x_of_entry = _scaled_to(x_of_entry, row.largest)
            y_of_entry = _scaled_to(y_of_entry, row.largest)
        return (round_to(x_of_entry, row.name).double() * round_to(y_of_entry, row.name)).T


def sample_product(n: fx.Node, values: Mapping[str, Any]) -> Sample | None:
    """A sample of a matrix product or convolution, but not of fused attention; else None. values: FP32 results by name."""
    if not is_tensor_core(target_of(n)) or row_of(n).attention or n.kwargs:
        return None
    args = fx.node.map_arg(n.args, lambda source: values[source.name])
    if not all(type(x) is Tensor and is_plain(x) and x.is_floating_point() and x.numel() for x in tensors_in(args)):
        return None
    try:
        args = _some_of(target_of(n), args)
        return Sample(target_of(n), args, target_of(n)(*over_tensors(_in_fp64, args)))
    except Exception as error:  # the operation has no FP64 kernel
        let_through(error)
        return None


def flag_costs(
    capture: Capture,
    errors: Mapping[str, Mapping[str, NodeError]],
    contributions: Mapping[str, Mapping[str, Contribution]],
    under_flags: Mapping[str, Mapping[str, float]],
    budget: float,
) -> dict[str, float]:
    """{flag: predicted share of the error budget that this flag alone would use}, for flags that affect an operation.
    under_flags: by product, results of `flag_errors`.

    A product's own contribution in a format is scaled by its error under the flag, divided by the error of rounding its
    result. A recurrent layer's contribution is scaled by the spacing of TF32's numbers.
    """
    squares = dict[str, float]()
    for n in capture.graph_module.graph.nodes:
        by_format = errors.get(n.name, {})
        if not by_format:
            continue
        fmt = next(iter(by_format))  # any format: its rounding error cancels
        effect = contributions[n.name][fmt]
        split = by_format[fmt].product
        costs = dict[str, float]()
        if row_of(n).recurrent:
            cost = effect.isolated * FORMATS["tf32"].epsilon / FORMATS[fmt].epsilon
            costs = {name: cost for name, flag in FLAGS.items() if flag.of == "recurrent"}
        elif split is not None and split.output:
            costs = {name: effect.own * local / split.output for name, local in under_flags[n.name].items()}
        for name, cost in costs.items():
            squares[name] = squares.get(name, 0.0) + cost**2
    return {name: math.sqrt(squares[name]) / budget for name in FLAGS if name in squares}


def _in_fp64(x: Tensor) -> Tensor:
    return plain(x).double()


def _first_matrix(x: Tensor) -> Tensor:
    """[.., m, k] -> [m, k], the first of a batch of matrices; [k] -> [1, k]."""
    batch = x.reshape(-1, *x.shape[-2:])
    return batch[0].reshape(-1, x.shape[-1])


def _scaled_to(x: Tensor, largest: float) -> Tensor:
    """A tensor multiplied so that its largest magnitude is `largest`."""
    return x * (largest / x.abs().max().clamp(min=1e-30))


def _some_of(target: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for some rows and columns of the result; for convolutions, part of one image and, unless groups have
    several channels, some channels."""
    row = operation_of(target)
    if row.packet not in FACTORS and row.gemm != "convolution":
        return args
    first, second = FACTORS.get(row.packet, (0, 1))
    x = args[first]
    y = args[second]
    added = args[:first]  # the first argument of addmm, baddbmm and others
    if row.gemm == "linear" and y.dim() == 2:
        # [.., k], [n, k], [n] or None
        rows = _some(x.reshape(-1, x.shape[-1]))
        return rows, *(z if z is None else _some(z) for z in args[1:])
    if row.gemm == "convolution" and x.dim() == y.dim():
        return _some_of_convolution(args)
    if y.dim() == 2 <= x.dim() and all(z.dim() == 1 for z in added):
        # [n], [.., k], [k, n]
        return *map(_some, added), _some(x.flatten(0, -2)), _some(y.T).T, *args[second + 1 :]
    if x.dim() == y.dim() > 2 and x.shape[0] == y.shape[0] and not added:
        # [b, m, k], [b, k, n]: the first of the batch
        return x[:1], y[:1]
    return args


def _some_of_convolution(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for a part of one image and some channels. args: as of `aten.convolution`: image [n, c_in, *size],
    weight [c_out, c_in / groups, *kernel], bias [c_out] or None, stride, padding, dilation, groups."""
    x, y = args[:2]
    one_filter_per_channel = args[6:] == x.shape[1:2] == y.shape[:1]
    no_groups = x.shape[1] == y.shape[1]
    image = x[:1]
    groups = args[6:]
    weight_and_bias = list(args[1:3])
    if no_groups or one_filter_per_channel:
        weight_and_bias = [z if z is None else _some(z) for z in weight_and_bias]
    if one_filter_per_channel:
        image = _some(x[0]).unsqueeze(0)  # the channels of the chosen filters
        groups = image.shape[1:2]
    dilation = args[5] if len(args) > 5 else 1
    return (_crop(image, y, dilation), *weight_and_bias, *args[3:6], *groups)


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
