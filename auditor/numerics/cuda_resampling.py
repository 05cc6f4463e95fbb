"""CUDA kernels of pooling, interpolation, padding and grid sampling that round otherwise than once.

Most are backward kernels, in which several outputs add to one input entry by atomic additions in the format. Shapes: n
samples, c channels, p input positions (all spatial dimensions together), q output positions. Rows below are [q, n * c].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .accumulate import add_in_order
from .cuda_exceptions import Given, exception, rounded_number, rounder

aten = torch.ops.aten

_Round = Callable[[Tensor], Tensor]
_Taps = tuple[Tensor, Tensor]
"""The input positions that an output position reads along one dimension, and their weights: ([q, taps], [q, taps])."""


def _rows(x: Tensor, spatial: int) -> Tensor:
    """[n, c, *spatial] or [c, *spatial] -> [positions, n * c]."""
    positions = math.prod(x.shape[x.dim() - spatial :])
    return x.reshape(-1, positions).T.contiguous()


def _from_rows(rows: Tensor, shape: Sequence[int]) -> Tensor:
    return rows.T.reshape(tuple(shape)).contiguous()


def _add_taps(grad: Tensor, taps: Sequence[_Taps], shape: Sequence[int], dtype: torch.dtype, r: _Round) -> Tensor:
    """The gradient of an input: each output's gradient times the weight of each tap, rounded, is added in the format.

    The weight of a tap is the product of its weights along every dimension, in FP32.
    """
    spatial = len(taps)
    sizes = shape[len(shape) - spatial :]
    rows = _rows(grad.float(), spatial)
    totals = torch.zeros(math.prod(sizes), rows.shape[1], dtype=dtype)
    for chosen in itertools.product(*(range(index.shape[1]) for index, _ in taps)):
        target, weight = torch.zeros(1, dtype=torch.int64), torch.ones(1)
        for (index, weights), tap, size in zip(taps, chosen, sizes, strict=True):
            target = (target[:, None] * size + index[:, tap]).reshape(-1)
            weight = (weight[:, None] * weights[:, tap]).reshape(-1)
        used = weight != 0
        terms = (weight[used, None] * rows[used]).to(dtype)
        totals = add_in_order(totals, target[used], terms)
    return _from_rows(totals, shape)


# Interpolation.


def _source_positions(size: int, out: int, align_corners: bool, scale: float | None) -> Tensor:
    """The input coordinate of each output position, in float32 as ATen computes it. Shape: [out]."""
    places = torch.arange(out, dtype=torch.float32)
    if align_corners:
        return places * ((size - 1) / (out - 1) if out > 1 else 0.0)
    ratio = 1 / scale if scale else size / out
    return (places + 0.5) * ratio - 0.5


def _linear_taps(size: int, out: int, align_corners: bool, scale: float | None) -> _Taps:
    """The two taps of each output position in linear interpolation."""
    source = _source_positions(size, out, align_corners, scale).clamp(min=0)
    first = source.long().clamp(max=size - 1)
    second = (first + 1).clamp(max=size - 1)
    share = (source - first).clamp(0, 1)
    return torch.stack([first, second], 1), torch.stack([1 - share, share], 1)


def _cubic_taps(size: int, out: int, align_corners: bool, scale: float | None) -> _Taps:
    """The four taps of each output position in cubic interpolation: Keys' convolution kernel with a = -0.75."""
    source = _source_positions(size, out, align_corners, scale)
    first = source.floor()
    t = source - first
    weights = torch.stack([_cubic_outer(t + 1), _cubic_inner(t), _cubic_inner(1 - t), _cubic_outer(2 - t)], 1)
    index = (first[:, None].long() + torch.arange(-1, 3)).clamp(0, size - 1)
    return index, weights


def _cubic_inner(x: Tensor, r: _Round = lambda x: x, a: float = -0.75) -> Tensor:
    """Keys' kernel at distances 0 <= x <= 1: (a + 2) x^3 - (a + 3) x^2 + 1, each step rounded by `r`."""
    return r(r(r(r(r((a + 2) * x) - (a + 3)) * x) * x) + 1)


def _cubic_outer(x: Tensor, r: _Round = lambda x: x, a: float = -0.75) -> Tensor:
    """Keys' kernel at distances 1 < x < 2: a x^3 - 5 a x^2 + 8 a x - 4 a, each step rounded by `r`."""
    return r(r(r(r(r(r(a * x) - 5 * a) * x) + 8 * a) * x) - 4 * a)


@exception("interpolate_backward")
def _interpolate_backward(given: Given, dtype: torch.dtype) -> Tensor:
    grad, shape = given["grad_output"], given["input_size"]
    if tuple(grad.shape) == tuple(shape):
        return grad.clone()
    spatial = len(shape) - 2
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[spatial]
    make = _cubic_taps if given["op"].startswith("upsample_bicubic") else _linear_taps
    taps = [
        make(size, out, given["align_corners"], given.get(name))
        for size, out, name in zip(shape[2:], grad.shape[2:], names, strict=True)
    ]
    return _add_taps(grad, taps, shape, dtype, rounder(dtype))


def _antialias_weights(given: Given, size: int, out: int, scale: float | None, dtype: torch.dtype) -> Tensor:
    """Weights of an antialiasing filter along one dimension, rounded to the format. Shape: [out, size]."""
    forward = aten._upsample_bicubic2d_aa if "bicubic" in given["op"] else aten._upsample_bilinear2d_aa
    units = torch.eye(size).reshape(size, 1, size, 1).repeat(1, 1, 1, 2)  # torch mistakes a width of 1
    weights = forward(units, [out, 2], given["align_corners"], scale, None)[:, 0, :, 0]
    return weights.T.to(dtype).float()


@exception("antialias")
def _antialias(given: Given, dtype: torch.dtype) -> Tensor:
    """Antialiased resizing; rounds the filter's weights, the sums along rows, and then the sums along columns."""
    r, x = rounder(dtype), given["self"]
    height, width = given["output_size"]
    across = _antialias_weights(given, x.shape[-1], width, given.get("scales_w"), dtype)
    down = _antialias_weights(given, x.shape[-2], height, given.get("scales_h"), dtype)
    return (down @ r(x.float() @ across.T)).to(dtype)


@exception("antialias_backward")
def _antialias_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Backward of antialiased resizing; rounds the product of the two weights, its product with the gradient, and each
    partial sum."""
    r, grad, shape = rounder(dtype), given["grad_output"], given["input_size"]
    across = _antialias_weights(given, shape[-1], grad.shape[-1], given.get("scales_w"), dtype)
    down = _antialias_weights(given, shape[-2], grad.shape[-2], given.get("scales_h"), dtype)
    rows = _rows(grad.float(), 2)
    totals = torch.zeros(shape[-2] * shape[-1], rows.shape[1], dtype=dtype)
    for y, x in itertools.product(range(shape[-2]), range(shape[-1])):
        weights = r(down[:, y, None] * across[None, :, x]).reshape(-1)
        used = weights.nonzero()[:, 0]
        terms = (weights[used, None] * rows[used]).to(dtype)
        totals = add_in_order(totals, torch.full_like(used, y * shape[-1] + x), terms)
    return _from_rows(totals, shape)


# Pooling.


def _windows(size: int, out: int, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Start and end of each output's window inside the input, and the window's length with padding. Shapes: [out]."""
    start = torch.arange(out) * stride - padding
    end = (start + kernel).clamp(max=size + padding)
    return start.clamp(min=0), end.clamp(max=size), end - start


def _adaptive_windows(size: int, out: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(out)
    return places * size // out, ((places + 1) * size + out - 1) // out


def _window_positions(
    windows: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Step through the entries of all windows at once; yields (output positions [m], the input position of each [m])."""
    most = [int((end - start).max()) for start, end in windows]
    for offsets in itertools.product(*map(range, most)):
        target, inside = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
        for (start, end), offset, size in zip(windows, offsets, sizes, strict=True):
            target = (target[:, None] * size + (start + offset)).reshape(-1)
            inside = (inside[:, None] & (start + offset < end)).reshape(-1)
        outputs = inside.nonzero()[:, 0]
        yield outputs, target[outputs]


def _spread(
    terms: Tensor, windows: Sequence[tuple[Tensor, Tensor]], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Add each output's term, [q, n * c], to every entry of its window, in the format."""
    sizes = shape[len(shape) - len(windows) :]
    totals = torch.zeros(math.prod(sizes), terms.shape[1], dtype=dtype)
    for outputs, targets in _window_positions(windows, sizes):
        totals = add_in_order(totals, targets, terms[outputs].to(dtype))
    return _from_rows(totals, shape)


def _several(value: Sequence[int], count: int) -> list[int]:
    return list(value) * count if len(value) == 1 else list(value)


@exception("avg_pool_backward")
def _avg_pool_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Backward of average pooling, which divides each output's gradient by the size of its window.

    2-D: the quotients are rounded and added in FP32. 3-D with stride 1 and no padding: the gradients are added in FP32,
    and the sum is divided. Other 3-D: the quotients are rounded and added in the format.
    """
    r, grad, x = rounder(dtype), given["grad_output"], given["self"]
    spatial = 3 if given["op"].startswith("avg_pool3d") else 2
    kernel = _several(given["kernel_size"], spatial)
    stride = _several(given["stride"] or kernel, spatial)
    padding = _several(given["padding"], spatial)
    sizes, outs = x.shape[-spatial:], grad.shape[-spatial:]
    windows = [_windows(*each) for each in zip(sizes, outs, kernel, stride, padding, strict=True)]
    divisor = torch.ones(1)
    for start, end, length in windows:
        counted = length if given["count_include_pad"] else end - start
        divisor = (divisor[:, None] * counted.float()).reshape(-1)
    if given["divisor_override"]:
        divisor = torch.full_like(divisor, given["divisor_override"])
    rows = _rows(grad.float(), spatial)
    if spatial == 2:
        terms = r(rows / r(divisor)[:, None])
        quotients = _from_rows(terms, grad.shape)
        summed = aten.avg_pool2d_backward(
            quotients, x.float(), kernel, stride, padding, given["ceil_mode"], given["count_include_pad"], 1
        )
        return summed.to(dtype)
    if all(step == 1 for step in stride) and not any(padding):
        return torch.ops.aten.avg_pool3d_backward(
            grad.float(),
            x.float(),
            kernel,
            stride,
            padding,
            given["ceil_mode"],
            given["count_include_pad"],
            given["divisor_override"],
        ).to(dtype)
    return _spread(r(rows / divisor[:, None]), [(start, end) for start, end, _ in windows], x.shape, dtype)


@exception("adaptive_avg_pool2d")
def _adaptive_avg_pool2d(given: Given, dtype: torch.dtype) -> Tensor:
    """Adaptive average pooling. Channels-last: the FP32 sum times the rounded inverse of the window's size; in other
    layouts the FP32 mean, rounded once."""
    x = given["self"]
    exact = aten._adaptive_avg_pool2d(x.float(), given["output_size"])
    if not _is_channels_last(x):
        return exact.to(dtype)
    r = rounder(dtype)
    heights, widths = (end - start for start, end in _windows_of(x, exact))
    area = (heights[:, None] * widths).float()
    factor = r(1 / r(area))
    return (exact * area * factor).to(dtype)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _windows_of(x: Tensor, y: Tensor, spatial: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [_adaptive_windows(*each) for each in zip(x.shape[-spatial:], y.shape[-spatial:], strict=True)]


@exception("adaptive_avg_pool2d_backward")
def _adaptive_avg_pool2d_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Backward of adaptive average pooling: divides the gradient by the window's width, then by its height, rounds both
    quotients, and adds in the format. Channels-last: multiplies by the rounded inverses instead."""
    r, grad, x = rounder(dtype), given["grad_output"], given["self"]
    windows = _windows_of(x, grad)
    heights, widths = ((end - start).float() for start, end in windows)
    height, width = (each.reshape(-1, 1) for each in torch.meshgrid(heights, widths, indexing="ij"))
    rows = _rows(grad.float(), 2)
    terms = r(rows * r(r(1 / width) * r(1 / height))) if _is_channels_last(x) else r(r(rows / width) / height)
    return _spread(terms, windows, x.shape, dtype)


@exception("adaptive_avg_pool3d_backward")
def _adaptive_avg_pool3d_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Backward of adaptive average pooling in 3-D. Windows that do not overlap: rounds once. Others: divides by one length
    after the other, rounds each quotient, and adds in the format."""
    r, grad, x = rounder(dtype), given["grad_output"], given["self"]
    if all(size % out == 0 for size, out in zip(x.shape[-3:], grad.shape[-3:], strict=True)):
        return aten._adaptive_avg_pool3d_backward(grad.float(), x.float()).to(dtype)
    windows = _windows_of(x, grad, 3)
    lengths = torch.meshgrid(*((end - start).float() for start, end in windows), indexing="ij")
    terms = _rows(grad.float(), 3)
    for length in lengths:
        terms = r(terms / length.reshape(-1, 1))
    return _spread(terms, windows, x.shape, dtype)


@exception("pool_backward_by_index")
def _pool_backward_by_index(given: Given, dtype: torch.dtype) -> Tensor:
    """Backward of max pooling with windows that may overlap: an entry that is the maximum of several windows gets the sum
    of their gradients, added in the format."""
    grad, x, indices = given["grad_output"], given["self"], given["indices"]
    spatial = 3 if "3d" in given["op"] else 2
    positions = math.prod(x.shape[-spatial:])
    planes = indices.reshape(-1, math.prod(indices.shape[-spatial:]))
    targets = planes + torch.arange(len(planes))[:, None] * positions
    totals = torch.zeros(x.numel(), dtype=dtype)
    return add_in_order(totals, targets.reshape(-1), grad.reshape(-1)).reshape(x.shape)


# Padding and sliding windows.


@exception("pad_backward")
def _pad_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Backward of reflection and replication padding: adds the gradients of all copies of an entry in the format."""
    grad, x, padding = given["grad_output"], given["self"], given["padding"]
    spatial = len(padding) // 2
    sizes = x.shape[-spatial:]
    places = torch.arange(math.prod(sizes), dtype=torch.float64).reshape(1, *sizes)
    forward = getattr(aten, given["op"].removesuffix("_backward"))
    targets = forward(places, padding).long().reshape(-1)
    totals = torch.zeros(math.prod(sizes), x.numel() // math.prod(sizes), dtype=dtype)
    return _from_rows(add_in_order(totals, targets, _rows(grad, spatial)), x.shape)


@exception("unfold_backward")
def _unfold_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Backward of `unfold`: adds the gradients of all windows in their order, and rounds each partial sum. Shapes: grad_in [*, windows, *, size] -> input_sizes."""
    grad, dim, size, step = given["grad_in"].float(), given["dim"], given["size"], given["step"]
    r, result = rounder(dtype), torch.zeros(tuple(given["input_sizes"]))
    if not result.dim():
        return grad.reshape(()).to(dtype)
    dim = dim % result.dim()
    windows = grad.movedim(-1, 0)  # [size, *]: entry by entry
    for entry in reversed(range(size)):  # a position's first window holds it at its last entry
        reached = result.narrow(dim, entry, (windows.shape[dim + 1] - 1) * step + 1)
        every = [slice(None)] * result.dim()
        every[dim] = slice(None, None, step)
        view = reached[tuple(every)]
        view.copy_(r(view + windows[entry]))
    return result.to(dtype)


# Grid sampling.

_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_LINEAR, _NEAREST, _CUBIC = 0, 1, 2


@exception("grid_sampler_backward")
def _grid_sampler_backward(given: Given, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Backward of `grid_sample`: coordinates, weights, products and sums are all rounded to the format.

    Shapes: grad_output [n, c, *out], input [n, c, *sizes], grid [n, *out, d] -> those of input and grid.
    """
    x, grid, mode = given["input"], given["grid"], given["interpolation_mode"]
    mask = given.get("output_mask", (True, True))
    r = rounder(dtype)
    grads, places = list[Tensor](), list[Tensor]()
    for sample in range(len(x)):
        one = _Sample(x[sample].float(), grid[sample].float(), given["grad_output"][sample].float(), given, r, dtype)
        run = {_LINEAR: one.linear, _NEAREST: one.nearest, _CUBIC: one.cubic}[mode]
        grad_input, grad_grid = run()
        grads.append(grad_input.float().T.reshape(x.shape[1:]))
        places.append(grad_grid.float().reshape(grid.shape[1:]))
    grad_x, grad_places = torch.stack(grads).to(dtype), torch.stack(places).to(dtype)
    return (grad_x if mask[0] else None), (grad_places if mask[1] else None)


class _Sample:
    """One sample of grid_sampler's backward. Shapes: values [p, c], grad [q, c], coordinates [d] of [q], x first."""

    def __init__(self, x: Tensor, grid: Tensor, grad: Tensor, given: Given, r: _Round, dtype: torch.dtype) -> None:
        self.sizes = list(x.shape[1:])
        self.values = x.flatten(1).T.contiguous()
        self.grad = grad.flatten(1).T.contiguous()
        self.coordinates = list(grid.reshape(-1, grid.shape[-1]).unbind(1))
        self.padding, self.align = given["padding_mode"], given["align_corners"]
        self.r, self.dtype = r, dtype
        self.totals = torch.zeros(self.values.shape, dtype=dtype)

    def linear(self) -> tuple[Tensor, Tensor]:
        """Gradients of input [p, c] and grid [q, d] in bilinear and trilinear sampling."""
        r, dims = self.r, len(self.sizes)
        sources = [self.source(at) for at in range(dims)]  # x first
        low = [source.floor() for source, _ in sources]
        distances = [
            (r(r(first + 1) - source), r(source - r(first))) for (source, _), first in zip(sources, low, strict=True)
        ]
        slopes = [torch.zeros(len(self.grad)) for _ in range(dims)]
        corners = [bits[::-1] for bits in itertools.product((0, 1), repeat=dims)]  # x changes fastest
        places = [self.position([low[at] + bit for at, bit in enumerate(bits)]) for bits in corners]
        for bits, (place, inside) in zip(corners, places, strict=True):
            weight = distances[0][bits[0]]
            for at in range(1, dims):
                weight = r(weight * distances[at][bits[at]])
            self.add(place, inside, r(weight[:, None] * self.grad))
        for channel in range(self.grad.shape[1]):
            flow = self.grad[:, channel]
            for bits, (place, inside) in zip(corners, places, strict=True):
                value = self.values[place, channel]
                for at in range(dims):
                    term = value
                    for other in range(dims):
                        if other != at:
                            term = r(term * distances[other][bits[other]])
                    term = r(term * flow)
                    moved = r(slopes[at] + term if bits[at] else slopes[at] - term)
                    slopes[at] = torch.where(inside, moved, slopes[at])
        grid = [(r(mult * slope)) for (_, mult), slope in zip(sources, slopes, strict=True)]
        return self.totals, torch.stack(grid, 1).to(self.dtype)

    def nearest(self) -> tuple[Tensor, Tensor]:
        """Gradients of input and grid in nearest sampling; the grid's are zero."""
        rounded = [self.source(at)[0].round() for at in range(len(self.sizes))]
        place, inside = self.position(rounded)
        self.add(place, inside, self.grad)
        return self.totals, torch.zeros(len(self.grad), len(self.sizes), dtype=self.dtype)

    def cubic(self) -> tuple[Tensor, Tensor]:
        """Gradients of input and grid in bicubic sampling; coefficients and their derivatives are rounded at each step."""
        r = self.r
        x_source, x_scale = self.unnormalized(0)  # each [q]
        y_source, y_scale = self.unnormalized(1)
        x_low = x_source.floor()
        y_low = y_source.floor()
        x_weights, x_slopes = _cubic_coefficients(r(x_source - x_low), r)  # four of [q]
        y_weights, y_slopes = _cubic_coefficients(r(y_source - y_low), r)
        x_gradient = torch.zeros(len(self.grad))
        y_gradient = torch.zeros(len(self.grad))
        for i, j in itertools.product(range(4), range(4)):
            place, inside = self.position([self.bounded(x_low - 1 + i, 0), self.bounded(y_low - 1 + j, 1)])
            x_weight = x_weights[i]
            y_weight = y_weights[j]
            by_row = r(self.grad * x_weight[:, None])
            self.add(place, inside, r(by_row * y_weight[:, None]))
            for channel in range(self.grad.shape[1]):
                value = torch.where(inside, self.values[place, channel], 0.0)
                flow = self.grad[:, channel]
                x_term = r(r(r(value * x_slopes[i]) * y_weight) * flow)
                y_term = r(r(r(value * y_slopes[j]) * x_weight) * flow)
                x_gradient = r(x_gradient - x_term)
                y_gradient = r(y_gradient - y_term)
        grid = [r(x_scale * x_gradient), r(y_scale * y_gradient)]
        return self.totals, torch.stack(grid, 1).to(self.dtype)

    def add(self, place: Tensor, inside: Tensor, terms: Tensor) -> None:
        """Add terms, [q, c], to the entries at `place`, in the format."""
        self.totals = add_in_order(self.totals, place[inside], terms[inside].to(self.dtype))

    def position(self, coordinates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The flat position of integer coordinates, x first, and whether it lies inside the input. Shapes: [q]."""
        place, inside = torch.zeros(len(self.grad), dtype=torch.int64), torch.ones(len(self.grad), dtype=torch.bool)
        for size, coordinate in zip(self.sizes, reversed(coordinates), strict=True):
            inside &= (coordinate >= 0) & (coordinate < size)
            place = place * size + coordinate.nan_to_num(0).clamp(0, size - 1).long()
        return place, inside

    def unnormalized(self, at: int) -> tuple[Tensor, Tensor]:
        """Axis `at` (0: x) of the grid, converted from [-1, 1] to input positions, and the derivative of this conversion;
        both are rounded to the format."""
        r, size, x = self.r, self.sizes[len(self.sizes) - 1 - at], self.coordinates[at]
        source = r((x + 1) / 2 * (size - 1)) if self.align else r(((x + 1) * size - 1) / 2)
        slope = rounded_number(rounded_number(size - 1 if self.align else size, self.dtype) / 2, self.dtype)
        return source, torch.full_like(source, slope)

    def source(self, at: int) -> tuple[Tensor, Tensor]:
        """The positions of `unnormalized` after the padding mode moved those outside the input, and their derivative with
        respect to the grid; both are rounded to the format."""
        r, size = self.r, self.sizes[len(self.sizes) - 1 - at]
        source, slope = self.unnormalized(at)
        if self.padding == _REFLECTION:
            source, sign = self.reflected(source, size)
            slope = r(slope * sign)
        if self.padding in (_BORDER, _REFLECTION):
            most = rounded_number(size - 1, self.dtype)
            slope = torch.where((source <= 0) | (source >= most), 0.0, slope)
            source = source.clamp(0, most)
        return source, slope

    def reflected(self, source: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Coordinates reflected at the borders, and the sign of their derivative."""
        r = self.r
        low, high = (0, 2 * (size - 1)) if self.align else (-1, 2 * size - 1)
        if low == high:
            return torch.zeros_like(source), torch.zeros_like(source)
        least, span = rounded_number(low / 2, self.dtype), rounded_number((high - low) / 2, self.dtype)
        shifted = r(source - least)
        sign = torch.where(shifted < 0, -1.0, 1.0)
        shifted = shifted.abs()
        extra = r(torch.fmod(shifted, span))
        even = torch.floor(r(shifted / span)) % 2 == 0
        return torch.where(even, r(extra + least), r(r(span - extra) + least)), torch.where(even, sign, -sign)

    def bounded(self, coordinate: Tensor, at: int) -> Tensor:
        """Integer positions along axis `at` (0: x) after the padding mode moved those outside, for bicubic sampling."""
        size = self.sizes[len(self.sizes) - 1 - at]
        if self.padding == _REFLECTION:
            coordinate = self.reflected(coordinate, size)[0]
        if self.padding in (_BORDER, _REFLECTION):
            coordinate = coordinate.clamp(0, size - 1)
        return coordinate.trunc()


def _cubic_coefficients(t: Tensor, r: _Round, a: float = -0.75) -> tuple[list[Tensor], list[Tensor]]:
    """The four weights of cubic sampling at a distance t in [0, 1) after the second tap, and their derivatives; rounded
    at each step."""
    rest = r(1 - t)
    weights = [
        _cubic_outer(r(t + 1), r),
        _cubic_inner(t, r),
        _cubic_inner(rest, r),
        _cubic_outer(r(rest + 1), r),
    ]

    def slope(x: Tensor, first: float, second: float, third: float) -> Tensor:
        return r(r(r(r(first * x) + second) * x) + third)

    slopes = [
        slope(r(-1 - t), -3 * a, -10 * a, -8 * a),
        slope(-t, -3 * (a + 2), -2 * (a + 3), 0.0),
        slope(rest, 3 * (a + 2), -2 * (a + 3), 0.0),
        slope(r(2 - t), 3 * a, -10 * a, 8 * a),
    ]
    return weights, slopes
