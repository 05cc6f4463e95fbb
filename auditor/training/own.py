"""Runs the user's own training step: model, loss and `backward()`, in FP32 or low, like the loop in the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..artefact.applying import apply_plan
from ..artefact.base import autocast_type, plan_table
from ..capture.emulation import emulate
from ..capture.functional import PinnedDraw
from ..capture.intercept import Handler, intercept
from ..errors import LoadError, let_through
from ..execution.policy import PrecisionChoice, choice_from_scopes, plain
from ..execution.step import LowStep, Step, failure_of_step, gradient_error, unscale
from ..isolation import isolate
from ..isolation.answer import copy_batch, from_the_start
from ..isolation.process import disable_fused_path
from ..numerics.casting import widen
from ..numerics.formats import dtype_of
from ..records import Plan
from .step import LOSS, TrainingStep, in_the_model

FAITHFUL = 1e-3
"""Largest relative L2 difference between the recorded operations' gradients and the step's own that counts as equal."""


@dataclass(frozen=True)
class StepPrecision:
    """How a step runs low: the model under a plan and the loss in FP32, or without a plan both under autocast.

    format "fp32": without any autocast region.
    """

    format: str
    plan: Plan | None = None

    @property
    def precision(self) -> PrecisionChoice:
        """Precision of a module path, or of the loss."""
        if self.plan is None:
            return PrecisionChoice(lambda path: self.format if path == LOSS else plain(self.format)(path))
        own = choice_from_scopes(self.plan.scopes)
        return PrecisionChoice(lambda path: "fp32" if path == LOSS else own(path), own.keep)


FP32 = StepPrecision("fp32")


def own_step(step: Step, low: StepPrecision, scale: float = 1.0) -> LowStep:
    """Loss and unscaled gradients of one step at a loss scale; the caller has set training mode.

    Model, loss, batch, gradients and generators are restored. An exception becomes the step's failure.
    """
    subject = step.subject
    assert subject.objective is not None
    try:
        with isolate(subject.model):
            if low.plan is not None:
                apply_plan(subject.model, plan_table(low.plan))
            module = _Region(subject.model, subject.objective.loss_fn, low)
            run = partial(_forward_and_backward, step, module, low, scale)
            return from_the_start(module, step.batch, run, step.seed)
    except Exception as error:
        let_through(error)
        return failure_of_step(error)


def settle(step: Step) -> Step:
    """Replace the recorded operations' gradients in a step by those of the model itself.

    They differ where the model has an autograd.Function, or hooks that change gradients. Raises:
    LoadError(slug="bad-loss") where the backward pass raises.
    """
    own = own_step(step, FP32)
    if own.failure is not None:
        raise LoadError(f"the training step already raised in FP32: {own.failure}; fix it first", slug="bad-loss")
    result = {}
    for name, gradient in step.by_parameter.items():
        theirs = own.gradients.get(name)
        result[name] = torch.zeros_like(gradient) if theirs is None else theirs
    step.faithful = gradient_error(result, step.by_parameter) <= FAITHFUL
    step.by_parameter = result
    for place in step.capture.placeholders:
        if place.fqn in result:
            step.gradients[place.name] = [result[place.fqn]]
    return step


class _Region(TrainingStep):
    """A training step like the loop in the report: a plan has its own regions, and the loss is outside of them."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, low: StepPrecision) -> None:
        super().__init__(model, loss_fn)
        self.low = low
        self.kept: list[torch.Tensor] = []
        self.returned = "tensor"

    def forward(self, args: Any, kwargs: Any, targets: Any, named: Any) -> Any:
        """The loss; whoever records the step works on copies."""
        without = self.low.format == "fp32" or self.low.plan is not None
        with (
            nullcontext()
            if without
            else torch.autocast(autocast_type(self.model, (args, kwargs)), dtype=dtype_of(self.low.format))
        ):
            loss = super().forward(args, kwargs, targets, named)
        self.kept.append(loss)
        return loss

    def loss_inputs(self, outputs: Any) -> Any:
        """The outputs, converted to FP32 where a plan may have made them low and the loss is a function of them."""
        self.returned = _kind(outputs, self.loss_fn is None)
        return outputs if self.low.plan is None or self.loss_fn is None else _wide(outputs)


def _kind(outputs: Any, own: bool) -> str:
    """tensor | tensors: inputs of a loss function; attribute | mapping: contains the model's own loss."""
    if isinstance(outputs, torch.Tensor):
        return "tensor"
    if not own:
        return "tensors"
    return "attribute" if getattr(outputs, "loss", None) is not None else "mapping"


def _forward_and_backward(step: Step, module: _Region, low: StepPrecision, scale: float) -> LowStep:
    with torch.enable_grad(), disable_fused_path():
        args, kwargs = copy_batch(step.batch)
        with _around(step, low):
            module(*args, **kwargs)
        loss, step.returned = module.kept[-1], module.returned
        with _around(step, low):
            gradients = _backward(loss, module, scale)
    return LowStep(float(loss.detach()), gradients)


@contextmanager
def _around(step: Step, low: StepPrecision) -> Iterator[None]:
    """FP32: outside the user's own regions, as in the recording. Low: natively on a GPU, emulated elsewhere.

    A GPU's half kernels draw other random numbers than its FP32 kernels: a step with random operations runs under the
    emulation even there, which draws in FP32.
    """
    if low.format == "fp32":
        with intercept(Handler(), around=torch.float32):
            yield
    elif step.on_gpu and not any(isinstance(n.target, PinnedDraw) for n in step.capture.graph_module.graph.nodes):
        yield
    else:
        with emulate("cuda"):
            yield


def _backward(loss: torch.Tensor, module: nn.Module, scale: float) -> dict[str, torch.Tensor | None]:
    """Unscaled gradients; the caller restores previous values of `grad`."""
    trainable = {in_the_model(n): p for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
    for parameter in trainable.values():
        parameter.grad = None
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    return {name: unscale(parameter.grad, scale) for name, parameter in trainable.items()}


def _wide(outputs: Any) -> Any:
    """Convert outputs to FP32, also inside a dataclass, which torch treats as a leaf: like the loop in the report."""

    def wide(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        result = copy(leaf)
        for item in fields(leaf):
            object.__setattr__(result, item.name, _wide(getattr(leaf, item.name)))
        return result

    return pytree.tree_map(wide, widen(outputs))
