"""Remedies for weights in BF16 or FP16: the rehearsal applies each function; reports print its code to paste."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any


def fp32_master_weights(optimizer: Any) -> None:
    """The optimizer updates FP32 copies of the weights. Its state is FP32 as well."""
    masters: dict[Any, Any] = {}
    stored = optimizer.param_groups[0]["params"][0].dtype

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            grad, p.grad = p.grad.float(), None
            p.data = masters.setdefault(p, p.data.float())
            p.grad = grad

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in masters:
            p.grad = None
            p.data = masters[p].to(stored)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def stochastic_rounding(optimizer: Any) -> None:
    """Updates are added in FP32 and rounded to BF16 at random, without bias. The optimizer's state is FP32."""
    import torch

    updated: list[Any] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            grad, p.grad = p.grad.float(), None
            p.data = p.data.float()
            p.grad = grad
            updated.append(p)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in updated:
            bits = p.data.contiguous().view(torch.int32)
            p.grad = None
            p.data = ((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32).bfloat16()
        updated.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def kahan_sums(optimizer: Any) -> None:
    """The rounding error of each BF16 update is kept and added to the next. The optimizer's state is FP32."""
    carried: dict[Any, Any] = {}
    updated: list[Any] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            grad, p.grad = p.grad.float(), None
            p.data = p.data.float()
            p.grad = grad
            updated.append(p)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in updated:
            exact = p.data + carried[p].float() if p in carried else p.data
            p.grad = None
            p.data = exact.bfloat16()
            carried[p] = (exact - p.data.float()).bfloat16()
        updated.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def fp32_accumulation(optimizer: Any) -> None:
    """Gradients of several backward passes are summed in FP32. `zero_grad` must set them to None, its default."""
    sums: dict[Any, Any] = {}

    def hook_of(p: Any) -> Callable[[Any], None]:
        def add(grad: Any) -> None:
            sums[p] = grad.float() if p.grad is None else sums[p] + grad.float()

        return add

    def put(p: Any) -> None:
        p.grad = sums[p].to(p.dtype)

    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.register_hook(hook_of(p))
        p.register_post_accumulate_grad_hook(put)


REMEDIES: dict[str, Callable[[Any], None]] = {
    one.__name__: one for one in (fp32_master_weights, stochastic_rounding, kahan_sums, fp32_accumulation)
}


def code_of(name: str) -> str:
    """Code to paste: the function, and a call of it."""
    function = re.sub(r": (Any|dict\[Any, Any\]|list\[Any\])|( -> [^:]+)(?=:\n)", "", inspect.getsource(REMEDIES[name]))
    return f"{function}\n\n{name}(optimizer)  # once, after the optimizer was made\n"
