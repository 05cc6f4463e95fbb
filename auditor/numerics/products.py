"""Matrix products and convolutions as tensor cores compute them: rounded inputs, a sum in float32, one rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .casting import in_float32
from .formats import Format
from .nodes import mutates, operation_of, overload_of


def product(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """A matrix product or convolution of tensors in a format on a CPU, as tensor cores compute it."""
    if _adds_apart(target, args):
        result: torch.Tensor = product(target, (*args[:2], None), kwargs, row) + args[2]
        return result
    return in_float32(target, args, kwargs, row)


def _adds_apart(target: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a linear layer is a product, rounded, and then a sum: torch joins them where the rows lie one after the other."""
    given = operation_of(target).gemm == "linear" and len(args) == 3 and args[2] is not None
    return given and args[0].dim() > 2 and not args[0].is_contiguous()


def is_tensor_core(target: Callable[..., Any]) -> bool:
    """Whether the operation is a matrix product or convolution that accumulates in float32 on tensor cores."""
    return operation_of(target).product and not mutates(overload_of(target))


def is_product(target: Callable[..., Any]) -> bool:
    """Whether the result is linear in each tensor argument, so that their errors reach it one beside the other."""
    return operation_of(target).linear and not mutates(overload_of(target))
