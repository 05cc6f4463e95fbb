"""Batch normalisation by running statistics, with the derivative by those statistics, which autograd leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..numerics.nodes import operation_of

_FLAGS = ("training", "use_input_stats")
"""What the operations call the flag for statistics of the batch; one of them has none."""


def takes_statistics(target: Any) -> bool:
    """Whether the operation can be given statistics; by these, an instance norm is a batch norm."""
    return isinstance(target, torch._ops.OpOverload) and operation_of(target).normalises == "statistics"


def has_statistics(target: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether this call normalises by statistics that are given, all of shape [C], and not by those of its input."""
    if not takes_statistics(target) or args[3] is None:
        return False
    names = _argument_names(target)
    return not any(args[names.index(flag)] for flag in _FLAGS if flag in names)


def _argument_names(target: Any) -> list[str]:
    return [argument.name for argument in target._schema.arguments]


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
    eps = (x, *args)[_argument_names(target).index("eps")]
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
        return result.data  # no view, which would hold the memory for as long as it has a place in autograd's graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.rsqrt(variance + ctx.eps) * (1.0 if weight is None else weight)
        sides = [dim for dim in range(x.dim()) if dim != 1]
        total = gradient.sum(sides)
        product = (gradient * x).sum(sides) - mean * total
        return gradient, None, None, -scale * total, -0.5 * scale * product / (variance + ctx.eps), None
