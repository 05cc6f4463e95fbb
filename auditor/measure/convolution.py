"""Convolutions with a way back that takes half as long as torch's own on one thread: by oneDNN, or in another layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from ..ops.products import conv2d_by_onednn, is_slow, linear_by_onednn
from ..trees import tensors_in

_LARGE_FILTER = 5
"""Rows and columns of a filter from which it matters in what order a depthwise convolution's derivative by it is computed."""

_DEFAULTS: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
"""Stride, padding, dilation and groups, where they are not given."""


def with_quick_backward(target: object, args: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
    """What computes this call of an operation, if it is a convolution that torch would be slow to differentiate."""
    if target is not torch.ops.aten.conv2d.default or any(x.dtype is not torch.float32 for x in tensors_in(args)):
        return None
    x, weight = args[:2]
    stride, padding, dilation, groups = (*args[3:], *_DEFAULTS[max(len(args) - 3, 0) :])
    if not all(isinstance(one, Sequence) and len(one) == 2 for one in (stride, padding)):
        return None
    if is_slow(x, weight) and (padding, dilation, groups) == ([0, 0], [1, 1], 1):
        # Of other layouts, what is left of a row of pixels would no longer tell which one it is.
        return partial(quick, stride=tuple(stride)) if list(stride) == [1, 1] or x.is_contiguous() else None
    return depthwise if stride == dilation == [1, 1] and _is_slow_depthwise(x, weight, groups) else None


def quick(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any, stride: tuple[int, ...] = (1, 1)
) -> torch.Tensor:
    """The native result, [N, out, H, W] of x [N, in, H, W] and weight [out, in, 1, 1], with the quick backward pass."""
    read = x if stride == (1, 1) else x[:, :, :: stride[0], :: stride[-1]]
    result: torch.Tensor = _Quick.apply(read, weight, bias, x.detach(), stride)  # type: ignore[no-untyped-call]
    return result


class _Quick(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        read: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(read, weight)
        return torch.conv2d(x, weight, bias, stride)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_x = conv2d_by_onednn(gradient, weight.transpose(0, 1).contiguous()) if ctx.needs_input_grad[0] else None
        by_weight = None
        if ctx.needs_input_grad[1]:
            pairs = zip(gradient.flatten(2), x.contiguous().flatten(2), strict=True)
            by_weight = reduce(torch.add, (linear_by_onednn(g, values) for g, values in pairs)).view_as(weight)
        return by_x, by_weight, gradient.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, None, None


def _is_slow_depthwise(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether every channel has one large filter of its own."""
    single = x.dim() == 4 and x.shape[1] == weight.shape[0] == groups > 1 and x.dtype is torch.float32
    large = single and min(weight.shape[2:]) >= _LARGE_FILTER
    return large and x.device.type == "cpu" and torch.get_num_threads() == 1


def depthwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    *_: Any,
) -> torch.Tensor:
    """The convolution, [N, C, H, W] of x [N, C, H, W] and weight [C, 1, h, w], a filter a channel, with its derivatives."""
    result: torch.Tensor = _Depthwise.apply(x, weight, bias, tuple(padding))  # type: ignore[no-untyped-call]
    return result


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return torch.conv2d(x, weight, bias, padding=padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]

        def found(pair: Sequence[torch.Tensor], index: int) -> torch.Tensor:
            rest = [1, 1], ctx.padding, [1, 1], False, [0, 0], len(weight), [index == 0, index == 1, False]
            result: torch.Tensor = torch.ops.aten.convolution_backward.default(*pair, weight, None, *rest)[index]
            return result

        inside = min(x.shape[2:]) > max(weight.shape[2:])  # in smaller images it is channels last that take long
        order = torch.channels_last if inside else torch.contiguous_format
        return (
            found((gradient, x), 0) if by_x else None,
            found([y.contiguous(memory_format=order) for y in (gradient, x)], 1).contiguous() if by_weight else None,
            gradient.sum((0, 2, 3)) if by_bias else None,
            None,
        )
