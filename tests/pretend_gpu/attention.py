"""Attention of the pretend GPU: one fused kernel, as CUDA runs it in half precision; with dropout by its parts."""

from typing import Any

import torch

from auditor.numerics.entries import over_tensors, tensors_in
from auditor.numerics.formats import is_low
from auditor.numerics.kernels import run_op
from auditor.numerics.nodes import arguments_of
from tests.pretend_gpu.kernels import lent
from tests.pretend_gpu.memory import on_pretend

OP = torch.ops.aten.scaled_dot_product_attention.default


def run(*args: Any, **kwargs: Any) -> Any:
    """`scaled_dot_product_attention` on tensors of the pretend GPU."""
    given = arguments_of(OP, args, kwargs, defaults=True)
    if given["dropout_p"] or not is_low(given["query"].dtype):
        return OP._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return _Fused.apply(given, *tensors_in(given))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Any, *tensors: torch.Tensor) -> Any:
        ctx.given, ctx.index = over_tensors(lambda x: lent(x).detach(), given), tensors[0].device.index
        return on_pretend(_attend(ctx.given), ctx.index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            given = over_tensors(lambda x: x.requires_grad_(x.is_floating_point()), ctx.given)
            tensors = tensors_in(given)
            wanted = [x for x in tensors if x.requires_grad]
            found = dict(zip(map(id, wanted), torch.autograd.grad(_attend(given), wanted, lent(gradient)), strict=True))
        return None, *(on_pretend(found[id(x)], ctx.index) if id(x) in found else None for x in tensors)


def _attend(given: dict[str, Any]) -> torch.Tensor:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    rest = {name: value for name, value in given.items() if name not in names}
    return run_op(OP, tuple(given[name] for name in names), rest)
