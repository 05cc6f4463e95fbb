"""Batch normalisation by running statistics, with the derivative by those statistics, which autograd leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

BATCH_NORMS: dict[Any, int] = {
    torch.ops.aten._native_batch_norm_legit_no_training.default: 6,
    torch.ops.aten._native_batch_norm_legit_functional.default: 7,
    torch.ops.aten.batch_norm.default: 7,
    torch.ops.aten.instance_norm.default: 7,
}
"""{operation: position of its eps}; by given statistics, an instance norm is a batch norm."""

_TRAINING = 5
"""Position of the flag for statistics of the batch, in those that have one."""


def has_statistics(target: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether this call normalises by statistics that are given, all of shape [C], and not by those of its input."""
    flagged = target is not torch.ops.aten._native_batch_norm_legit_no_training.default
    return target in BATCH_NORMS and args[3] is not None and not (flagged and args[_TRAINING])


def batch_norm(target: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """The native result, connected to the running statistics if it depends on them; they stay as they are.

    x: [N, C, *]. args: weight, bias, mean, variance (all [C]), and what else the operation takes, eps among it.
    """
    weight, bias, mean, variance, *rest = args
    if mean is None:
        return target(x, *args)
    native = target(x, weight, bias, mean.detach().clone(), variance.detach().clone(), *rest)
    if not has_statistics(target, (x, *args)):
        return native
    eps = (x, *args)[BATCH_NORMS[target]]
    if isinstance(native, torch.Tensor):
        return _ByStatistics.apply(native, x, weight, mean, variance, eps)  # type: ignore[no-untyped-call]
    return _ByStatistics.apply(native[0], x, weight, mean, variance, eps), *native[1:]  # type: ignore[no-untyped-call]


class _ByStatistics(torch.autograd.Function):
    """The identity on a result w (x - mean) / sqrt(variance + eps) + b; its backward adds the gradients by mean, variance."""

    @staticmethod
    def forward(
        ctx: Any,
        result: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.rsqrt(variance + ctx.eps) * (1.0 if weight is None else weight)
        sides = [dim for dim in range(x.dim()) if dim != 1]
        total = gradient.sum(sides)
        product = (gradient * x).sum(sides) - mean * total
        return gradient, None, None, -scale * total, -0.5 * scale * product / (variance + ctx.eps), None
