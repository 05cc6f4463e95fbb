"""A precision plan for the step of a capsule: an audit of the model with the loss that the user's step computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ...artefact.base import plan_table
from ...errors import AuditorError, let_through
from ...isolation.process import disable_compilers, swap_attribute
from ...training.step import LOSS
from ..rehearsal.result import Recipe
from .capsule import Capsule
from .steps import CapsuleStep
from .weights import load_weights


class _Stop(BaseException):
    """Ends the user's step at its first `backward`. No `except Exception` of the step catches it."""

    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__()
        self.loss = loss


def plan_of(
    step: CapsuleStep, capsule: Capsule, model: nn.Module, audit: Callable[..., Any], format: str
) -> Recipe | None:
    """The recipe of the recommended autocast plan in a format; None without one, or if the step is not one forward pass
    of the model and one loss."""
    arguments: list[Any] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: arguments.append((args, kwargs)), with_kwargs=True)
    batch = [one.batch for one in capsule.calls]
    try:
        loss = loss_of(step, batch)
    except AuditorError as error:
        let_through(error)
        return None
    finally:
        handle.remove()
        load_weights(capsule, model)
    if loss is None or len(arguments) != 1 or loss.numel() != 1:
        return None

    def loss_fn(outputs: Any) -> Any:
        """The loss of the user's step, whose call of the model returns `outputs`."""
        before = vars(model).pop("_compiled_call_impl", None)
        vars(model)["_compiled_call_impl"] = lambda *args, **kwargs: outputs  # in place of the whole call, hooks too
        try:
            return loss_of(step, batch)
        finally:
            vars(model).pop("_compiled_call_impl")
            if before is not None:
                vars(model)["_compiled_call_impl"] = before

    args, kwargs = arguments[0]
    how = {"formats": format, "strategies": "autocast", "mode": "training", "loss_fn": loss_fn, "quick": True}
    try:
        done = audit(model, args, kwargs=dict(kwargs), **how)
    except AuditorError as error:
        let_through(error)
        return None
    finally:
        load_weights(capsule, model)
    names = (done.recommended, f"autocast_{format}")
    plan = next((one for one in map(done.plans.get, names) if one is not None and one.strategy == "autocast"), None)
    if plan is None:
        return None
    scopes = {**plan_table(plan)["scopes"], LOSS: {"precision": "fp32"}}
    scale = (capsule.about.scale or 65536.0) if plan.format == "fp16" else None
    return Recipe("plan", f"the plan {plan.name} of a training audit", plan.format, scale=scale, scopes=scopes)


def loss_of(step: CapsuleStep, batch: Any) -> torch.Tensor | None:
    """Run the user's step up to its first `backward`; returns the tensor at which that begins."""

    def stop(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        raise _Stop(roots[0])

    with disable_compilers(), suppress(AuditorError), swap_attribute(torch.autograd, "backward", stop):
        try:
            step(batch)
        except _Stop as stopped:
            return stopped.loss
        except Exception as error:
            let_through(error)
    return None
