"""Matrix products of low-precision inputs with FP32 output. `patched_model.py` copies this code from `FACTORS` on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FACTORS = {"linear": (0, 1), "matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""{torch function: positions of the two factors of its product}."""


class _Product(torch.autograd.Function):
    """`torch.mm` or `torch.bmm` with FP32 output, for which torch defines no derivative. As under autocast, this class
    rounds the gradient to the factors' dtype."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.mm if x.dim() == 2 else torch.bmm)(x, y, out_dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        rounded = gradient.to(x.dtype)
        return rounded @ y.mT, x.mT @ rounded


def multiply(name: str, function: Callable[..., Any], low: Any, widen: Callable[[Any], Any]) -> torch.Tensor:
    """The FP32 result of a matrix product of low-precision inputs. low: the arguments (args, kwargs) in low precision.
    widen: converts these arguments to FP32.

    A GPU uses torch.mm(..., out_dtype=torch.float32). A CPU has no such kernel, and multiplies the rounded inputs in
    FP32: products of two FP16 or BF16 numbers are exact in FP32, so only the order of the sum differs.
    """
    args, kwargs = low
    first, second = FACTORS[name]
    x = args[first]
    if x.device.type == "cuda" and not kwargs and min(x.dim(), args[second].dim()) >= 2:
        y = args[second]
        added = None
        if first > 0:  # as in addmm, the matrix to add is the first argument
            added = args[0]
        elif len(args) > 2:  # the bias of a linear layer
            added = args[2]
        product = half_matmul(x, y.mT if name == "linear" else y)
        return product if added is None else product + added
    args, kwargs = widen(low)
    exact: torch.Tensor = function(*args, **kwargs)
    if exact.requires_grad:
        exact.register_hook(lambda gradient: gradient.to(x.dtype).float())  # type: ignore[no-untyped-call]
    return exact


def half_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x @ y` in FP32 for at least two dimensions: [*, m, k] @ [*, k, n] -> [*, m, n]."""
    product: Any = _Product.apply
    *_, m, k = x.shape
    n = y.shape[-1]
    if y.dim() == 2:
        rows = x.reshape(-1, k)  # [* m, k]
        return product(rows, y).view(*x.shape[:-1], n)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
    left = x.expand(*batch, m, k).reshape(-1, m, k)
    right = y.expand(*batch, k, n).reshape(-1, k, n)
    return product(left, right).view(*batch, m, n)
