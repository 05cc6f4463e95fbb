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
    r = rounder(dtype)
    grad = given["grad_output"]
    shape = given["input_size"]
    height = shape[-2]
    width = shape[-1]
    across = _antialias_weights(given, width, grad.shape[-1], given.get("scales_w"), dtype)  # [output, input]
    down = _antialias_weights(given, height, grad.shape[-2], given.get("scales_h"), dtype)
    rows = _rows(grad.float(), 2)
    totals = torch.zeros(height * width, rows.shape[1], dtype=dtype)
    for y, x in itertools.product(range(height), range(width)):
        weights = r(down[:, y, None] * across[None, :, x]).reshape(-1)  # of all outputs
        used = weights.nonzero()[:, 0]
        terms = (weights[used, None] * rows[used]).to(dtype)
        target = torch.full_like(used, y * width + x)
        totals = add_in_order(totals, target, terms)
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
    r = rounder(dtype)
    grad = given["grad_output"]
    x = given["self"]
    spatial = 3 if given["op"].startswith("avg_pool3d") else 2
    kernel = _several(given["kernel_size"], spatial)
    stride = _several(given["stride"] or kernel, spatial)
    padding = _several(given["padding"], spatial)
    ceil_mode = given["ceil_mode"]
    counts_padding = given["count_include_pad"]
    if spatial == 3 and all(step == 1 for step in stride) and not any(padding):
        divisor_override = given["divisor_override"]
        options = (kernel, stride, padding, ceil_mode, counts_padding, divisor_override)
        return torch.ops.aten.avg_pool3d_backward(grad.float(), x.float(), *options).to(dtype)
    axes = zip(x.shape[-spatial:], grad.shape[-spatial:], kernel, stride, padding, strict=True)
    windows = [_windows(*axis) for axis in axes]
    divisor = _window_sizes(given, windows)
    rows = _rows(grad.float(), spatial)
    if spatial == 2:
        quotients = _from_rows(r(rows / r(divisor)[:, None]), grad.shape)
        options = (kernel, stride, padding, ceil_mode, counts_padding, 1)
        return aten.avg_pool2d_backward(quotients, x.float(), *options).to(dtype)
    bounds = [(start, end) for start, end, _ in windows]
    return _spread(r(rows / divisor[:, None]), bounds, x.shape, dtype)


def _window_sizes(given: Given, windows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The divisor of each output's window, [outputs]. windows: (first entry, end, length with padding) along each axis."""
    sizes = torch.ones(1)
    for start, end, length in windows:
        counted = length if given["count_include_pad"] else end - start
        sizes = (sizes[:, None] * counted.float()).reshape(-1)
    if given["divisor_override"]:
        return torch.full_like(sizes, given["divisor_override"])
    return sizes


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
    x = given["input"]
    grid = given["grid"]
    grad = given["grad_output"]
    r = rounder(dtype)
    input_gradients = list[Tensor]()
    grid_gradients = list[Tensor]()
    for index in range(len(x)):
        sample = _Sample(x[index].float(), grid[index].float(), grad[index].float(), given, r, dtype)
        input_gradient, grid_gradient = sample.gradients(given["interpolation_mode"])
        input_gradients.append(input_gradient.float().T.reshape(x.shape[1:]))
        grid_gradients.append(grid_gradient.float().reshape(grid.shape[1:]))
    of_input = torch.stack(input_gradients).to(dtype)
    of_grid = torch.stack(grid_gradients).to(dtype)
    asks_input, asks_grid = given.get("output_mask", (True, True))
    return (of_input if asks_input else None), (of_grid if asks_grid else None)


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

    def gradients(self, mode: int) -> tuple[Tensor, Tensor]:
        """Gradients of input and grid in an interpolation mode."""
        if mode == _LINEAR:
            return self.linear()
        if mode == _NEAREST:
            return self.nearest()
        return self.cubic()

    def linear(self) -> tuple[Tensor, Tensor]:
        """Gradients of input [p, c] and grid [q, d] in bilinear and trilinear sampling."""
        r = self.r
        dims = len(self.sizes)
        sources = [self.source(axis) for axis in range(dims)]  # x first
        low = [position.floor() for position, _ in sources]

        # The weights of the lower and the upper entry along each axis, [q] each.
        axis_weights = list[tuple[Tensor, Tensor]]()
        for (position, _), first in zip(sources, low, strict=True):
            to_upper = r(r(first + 1) - position)
            to_lower = r(position - r(first))
            axis_weights.append((to_upper, to_lower))

        # A corner has a bit for each axis, x first: whether it is the upper entry. x changes fastest.
        corners = [bits[::-1] for bits in itertools.product((0, 1), repeat=dims)]
        places = list[tuple[Tensor, Tensor]]()
        for bits in corners:
            corner = [first + bit for first, bit in zip(low, bits, strict=True)]
            places.append(self.position(corner))

        for bits, (place, inside) in zip(corners, places, strict=True):
            weight = _rounded_product([axis_weights[axis][bit] for axis, bit in enumerate(bits)], r)
            self.add(place, inside, r(weight[:, None] * self.grad))
        slopes = self.linear_slopes(corners, places, axis_weights)
        grid = [r(derivative * slope) for (_, derivative), slope in zip(sources, slopes, strict=True)]
        return self.totals, torch.stack(grid, 1).to(self.dtype)

    def linear_slopes(
        self,
        corners: Sequence[tuple[int, ...]],
        places: Sequence[tuple[Tensor, Tensor]],
        axis_weights: Sequence[tuple[Tensor, Tensor]],
    ) -> list[Tensor]:
        """Gradients of the input positions, [q] for each axis: summed over channels and corners, in the format."""
        r = self.r
        dims = len(self.sizes)
        slopes = [torch.zeros(len(self.grad)) for _ in range(dims)]
        for channel in range(self.grad.shape[1]):
            flow = self.grad[:, channel]
            for bits, (place, inside) in zip(corners, places, strict=True):
                value = self.values[place, channel]
                for axis in range(dims):
                    weights = [axis_weights[other][bits[other]] for other in range(dims) if other != axis]
                    term = _rounded_product([value, *weights, flow], r)
                    if not bits[axis]:  # a lower entry's weight falls along the axis
                        term = -term
                    moved = r(slopes[axis] + term)
                    slopes[axis] = torch.where(inside, moved, slopes[axis])
        return slopes

    def nearest(self) -> tuple[Tensor, Tensor]:
        """Gradients of input and grid in nearest sampling; the grid's are zero."""
        positions = [self.source(axis)[0] for axis in range(len(self.sizes))]
        place, inside = self.position([position.round() for position in positions])
        self.add(place, inside, self.grad)
        return self.totals, torch.zeros(len(self.grad), len(self.sizes), dtype=self.dtype)

    def cubic(self) -> tuple[Tensor, Tensor]:
        """Gradients of input and grid in bicubic sampling; coefficients and their derivatives are rounded at each step."""
        r = self.r
        x_source, x_scale = self.unnormalized(0)  # each [q]
        y_source, y_scale = self.unnormalized(1)
        x_low = x_source.floor()
        y_low = y_source.floor()
        x_taps = list(zip(*_cubic_coefficients(r(x_source - x_low), r), strict=True))  # four of (weight, slope), [q]
        y_taps = list(zip(*_cubic_coefficients(r(y_source - y_low), r), strict=True))
        x_gradient = torch.zeros(len(self.grad))
        y_gradient = torch.zeros(len(self.grad))
        for i, j in itertools.product(range(4), range(4)):
            x = self.bounded(x_low - 1 + i, 0)
            y = self.bounded(y_low - 1 + j, 1)
            place, inside = self.position([x, y])
            x_weight, x_slope = x_taps[i]
            y_weight, y_slope = y_taps[j]
            by_row = r(self.grad * x_weight[:, None])
            self.add(place, inside, r(by_row * y_weight[:, None]))
            for channel in range(self.grad.shape[1]):
                value = torch.where(inside, self.values[place, channel], 0.0)
                flow = self.grad[:, channel]
                x_term = _rounded_product([value, x_slope, y_weight, flow], r)
                y_term = _rounded_product([value, y_slope, x_weight, flow], r)
                x_gradient = r(x_gradient - x_term)
                y_gradient = r(y_gradient - y_term)
        grid = [r(x_scale * x_gradient), r(y_scale * y_gradient)]
        return self.totals, torch.stack(grid, 1).to(self.dtype)

    def add(self, place: Tensor, inside: Tensor, terms: Tensor) -> None:
        """Add terms, [q, c], to the entries at `place`, in the format."""
        self.totals = add_in_order(self.totals, place[inside], terms[inside].to(self.dtype))

    def position(self, coordinates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The flat position of integer coordinates, x first, and whether it lies inside the input. Shapes: [q]."""
        place = torch.zeros(len(self.grad), dtype=torch.int64)
        inside = torch.ones(len(self.grad), dtype=torch.bool)
        for size, coordinate in zip(self.sizes, reversed(coordinates), strict=True):
            inside &= (coordinate >= 0) & (coordinate < size)
            nearest = coordinate.nan_to_num(0).clamp(0, size - 1).long()
            place = place * size + nearest
        return place, inside

    def unnormalized(self, axis: int) -> tuple[Tensor, Tensor]:
        """An axis (0: x) of the grid, converted from [-1, 1] to input positions, and the derivative of this conversion;
        both are rounded to the format."""
        r = self.r
        size = self.size_along(axis)
        x = self.coordinates[axis]
        if self.align:
            length = size - 1
            source = r((x + 1) / 2 * length)
        else:
            length = size
            source = r(((x + 1) * size - 1) / 2)
        half = rounded_number(length, self.dtype) / 2
        slope = rounded_number(half, self.dtype)
        return source, torch.full_like(source, slope)

    def size_along(self, axis: int) -> int:
        """The input's size along an axis (0: x, which is the last dimension)."""
        return self.sizes[len(self.sizes) - 1 - axis]

    def source(self, axis: int) -> tuple[Tensor, Tensor]:
        """The positions of `unnormalized` after the padding mode moved those outside the input, and their derivative with
        respect to the grid; both are rounded to the format."""
        size = self.size_along(axis)
        source, slope = self.unnormalized(axis)
        if self.padding == _REFLECTION:
            source, sign = self.reflected(source, size)
            slope = self.r(slope * sign)
        if self.padding in (_BORDER, _REFLECTION):
            last = rounded_number(size - 1, self.dtype)
            is_at_border = (source <= 0) | (source >= last)
            slope = torch.where(is_at_border, 0.0, slope)
            source = source.clamp(0, last)
        return source, slope

    def reflected(self, source: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Coordinates reflected at the borders, and the sign of their derivative."""
        r = self.r
        low = -1  # the borders, in halves of an entry
        high = 2 * size - 1
        if self.align:
            low = 0
            high = 2 * (size - 1)
        if low == high:
            return torch.zeros_like(source), torch.zeros_like(source)
        first = rounded_number(low / 2, self.dtype)
        span = rounded_number((high - low) / 2, self.dtype)
        shifted = r(source - first)
        sign = torch.where(shifted < 0, -1.0, 1.0)
        shifted = shifted.abs()
        rest = r(torch.fmod(shifted, span))
        is_even = torch.floor(r(shifted / span)) % 2 == 0  # an even number of reflections
        forward = r(rest + first)
        backward = r(r(span - rest) + first)
        return torch.where(is_even, forward, backward), torch.where(is_even, sign, -sign)

    def bounded(self, coordinate: Tensor, axis: int) -> Tensor:
        """Integer positions along an axis (0: x) after the padding mode moved those outside, for bicubic sampling."""
        size = self.size_along(axis)
        if self.padding == _REFLECTION:
            coordinate, _ = self.reflected(coordinate, size)
        if self.padding in (_BORDER, _REFLECTION):
            coordinate = coordinate.clamp(0, size - 1)
        return coordinate.trunc()


def _rounded_product(factors: Sequence[Tensor], r: _Round) -> Tensor:
    """The product of at least one factor, rounded after each multiplication."""
    result = factors[0]
    for factor in factors[1:]:
        result = r(result * factor)
    return result


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
