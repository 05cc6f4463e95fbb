"""Convolutions with 1x1 filters by oneDNN, forwards and backwards: torch's own take twice as long on one thread."""

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
    """The convolution, [N, out, H, W] of x [N, in, H, W] and weight [out, in, 1, 1], with its derivatives."""
    result: torch.Tensor = _Quick.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Quick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return conv2d_by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_x = conv2d_by_onednn(gradient, weight.transpose(0, 1).contiguous()) if ctx.needs_input_grad[0] else None
        by_weight = None
        if ctx.needs_input_grad[1]:
            pairs = zip(gradient.flatten(2), x.contiguous().flatten(2), strict=True)
            by_weight = torch.stack([linear_by_onednn(g, values) for g, values in pairs]).sum(0).view_as(weight)
        return by_x, by_weight, gradient.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
