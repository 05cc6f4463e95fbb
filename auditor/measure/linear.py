"""Linear layers as torch computes them, and their way back by oneDNN: torch's own kernels take twice as long on some processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops.products import fastest, linear_by_onednn

_LINEAR = torch.ops.aten.linear.default
_ADDMM = torch.ops.aten.addmm.default


def with_quick_backward(
    target: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., torch.Tensor] | None:
    """What computes this call of an operation, if it is a linear layer whose derivatives oneDNN computes in less time than torch."""
    found = linear if target is _LINEAR else joined if target is _ADDMM else None
    if found is None or kwargs:
        return None
    with torch.no_grad():
        return found if fastest(target, args, kwargs) is not target else None  # type: ignore[arg-type]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The native result, with the quick backward pass. Shapes: [*, in], [out, in], [out] -> [*, out]."""
    result: torch.Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def joined(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `linear`, of `aten.addmm`. Shapes: [out], [rows, in], [in, out] -> [rows, out]."""
    result: torch.Tensor = _Joined.apply(bias, x, weight)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        result: torch.Tensor = _LINEAR(x, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        by_x = linear_by_onednn(rows, weight.t()).view_as(x) if ctx.needs_input_grad[0] else None
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = linear_by_onednn(rows.t(), x.reshape(-1, x.shape[-1]).t())
        return by_x, by_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        result: torch.Tensor = _ADDMM(bias, x, weight)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_bias = gradient.sum(0) if ctx.needs_input_grad[0] else None
        by_x = linear_by_onednn(gradient, weight) if ctx.needs_input_grad[1] else None
        by_weight = linear_by_onednn(x.t(), gradient.t()) if ctx.needs_input_grad[2] else None
        return by_bias, by_x, by_weight
