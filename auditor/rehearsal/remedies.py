"""Remedies for weights in BF16 or FP16: the rehearsal applies each function; reports print its code for the user."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
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

    def add(p: Any, grad: Any) -> None:
        sums[p] = grad.float() if p.grad is None else sums[p] + grad.float()

    def put(p: Any) -> None:
        p.grad = sums[p].to(p.dtype)

    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.register_hook(lambda grad, p=p: add(p, grad))
        p.register_post_accumulate_grad_hook(put)


REMEDIES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "fp32_master_weights": (fp32_updates, ("master",)),
    "stochastic_rounding": (fp32_updates, ("stochastic",)),
    "kahan_sums": (fp32_updates, ("kahan",)),
    "fp32_accumulation": (fp32_accumulation, ()),
}
"""{name of a remedy: (function, its arguments after the optimizer)}."""


def repair(name: str, optimizer: Any) -> None:
    """Apply a remedy to an optimizer."""
    function, given = REMEDIES[name]
    function(optimizer, *given)


def title_of(name: str) -> str:
    """A remedy's name as reports print it."""
    return name.replace("_", " ").replace("fp32", "FP32").replace("kahan", "Kahan")


def code_of(name: str) -> str:
    """Code that the user can paste: the remedy's function, and the call that applies the function."""
    function, given = REMEDIES[name]
    text = re.sub(r": (Any|str|dict\[Any, Any\]|list\[Any\])|( -> [^:]+)(?=:\n)", "", inspect.getsource(function))
    call = ", ".join(["optimizer", *(f'"{one}"' for one in given)])
    return f"{text}\n\n{function.__name__}({call})  # once, after creating the optimizer\n"
