"""Convolutions with 1x1 filters, with a backward pass by oneDNN: torch's own takes twice as long on one thread."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.products import conv2d_by_onednn, is_slow, linear_by_onednn


def has_quick_backward(target: object, args: tuple[Any, ...]) -> bool:
    """Whether this call of an operation is a 1x1 convolution of stride 1 that torch would be slow to differentiate."""
    plain = ([1, 1], [0, 0], [1, 1], 1)
    if target is not torch.ops.aten.conv2d.default or not is_slow(*args[:2]):
        return False
    return all(given == default for given, default in zip(args[3:], plain, strict=False))


def quick(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """The native result, [N, out, H, W] of x [N, in, H, W] and weight [out, in, 1, 1], with the quick backward pass."""
    with torch.no_grad():
        native = torch.conv2d(x, weight, bias)
    result: torch.Tensor = _Quick.apply(native, x, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Quick(torch.autograd.Function):
    """The identity on a result w x + b; its backward adds the gradients by x, w and b."""

    @staticmethod
    def forward(
        ctx: Any, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_x = conv2d_by_onednn(gradient, weight.transpose(0, 1).contiguous()) if ctx.needs_input_grad[1] else None
        by_weight = None
        if ctx.needs_input_grad[2]:
            pairs = zip(gradient.flatten(2), x.contiguous().flatten(2), strict=True)
            by_weight = torch.stack([linear_by_onednn(g, values) for g, values in pairs]).sum(0).view_as(weight)
        return None, by_x, by_weight, gradient.sum((0, 2, 3)) if ctx.needs_input_grad[3] else None
