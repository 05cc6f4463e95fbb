"""Remedies for weights in BF16 or FP16: the rehearsal applies each function; reports print its code for the user."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any


def fp32_updates(optimizer: Any, rounding: str) -> None:
    """Make the optimizer update weights in FP32, with its state in FP32. rounding: how to treat the part of an update
    that the stored weight cannot represent: "master" keeps the part in FP32, "kahan" in BF16; "stochastic" rounds up
    with the probability that makes the mean exact."""
    import torch

    rest: dict[Any, Any] = {}
    updated: list[Any] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            updated.append((p, p.dtype))
            grad, p.grad = p.grad.float(), None
            p.data = p.data.float() + rest.get(p, 0.0)
            p.grad = grad

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p, stored in updated:
            exact, p.grad = p.data, None
            if rounding == "stochastic":
                bits = exact.contiguous().view(torch.int32)
                p.data = ((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32).to(stored)
            else:
                p.data = exact.to(stored)
                rest[p] = (exact - p.data).to(torch.float32 if rounding == "master" else torch.bfloat16)
        updated.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def fp32_accumulation(optimizer: Any) -> None:
    """Sum the gradients of several backward passes in FP32. `zero_grad` must set gradients to None, its default."""
    sums: dict[Any, Any] = {}

    def add(p: Any, grad: Any) -> Any:
        sums[p] = grad.float() if p.grad is None else sums[p] + grad.float()
        p.grad = None  # torch would add the sum to it
        return sums[p].to(p.dtype)

    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.register_hook(lambda grad, p=p: add(p, grad))


def set_eps(optimizer: Any, eps: float) -> None:
    """Set the optimizer's eps. FP16 rounds 1e-8, Adam's default, to zero."""
    for group in optimizer.param_groups:
        group["eps"] = eps


ROUNDINGS = ("fp32_master_weights", "stochastic_rounding", "kahan_sums")
"""Remedies that update the weights in FP32."""
REMEDIES: dict[str, tuple[str, partial[None]]] = {
    "fp32_master_weights": ("FP32 master weights", partial(fp32_updates, rounding="master")),
    "stochastic_rounding": ("stochastic rounding", partial(fp32_updates, rounding="stochastic")),
    "kahan_sums": ("Kahan sums", partial(fp32_updates, rounding="kahan")),
    "fp32_accumulation": ("FP32 accumulation", partial(fp32_accumulation)),
    "eps": ("eps = 1e-4", partial(set_eps, eps=1e-4)),
}
"""{name of a remedy: (title, function of an optimizer)}."""


def code_of(name: str) -> str:
    """Code that the user can paste: the remedy's function, and the call that applies the function."""
    function, given = REMEDIES[name][1].func, REMEDIES[name][1].keywords
    text = re.sub(r": (Any|str|float|dict\[Any, Any\]|list\[Any\])|( -> [^:]+)(?=:\n)", "", inspect.getsource(function))
    call = ", ".join(["optimizer", *(f"{key}={value!r}" for key, value in given.items())])
    return f"{text}\n\n{function.__name__}({call})  # once, after creating the optimizer\n"
