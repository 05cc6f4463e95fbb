"""A training step as a module. The recording has the model's own paths, and the step runs like a training loop:
forward, loss and `backward()`, in FP32 or in low precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from ..artefact.applying import apply_plan
from ..artefact.base import autocast_type, plan_table
from ..capture.capture import capture
from ..capture.functional import PinnedDraw
from ..emulation.emulate import emulate
from ..emulation.intercept import Handler, intercept
from ..errors import CaptureError, LoadError, let_through
from ..execution.policy import PrecisionChoice, choice_from_scopes, plain
from ..isolation import isolate
from ..isolation.process import disable_fused_path
from ..isolation.run_model import copy_batch, from_the_start
from ..numerics.casting import widen
from ..numerics.formats import dtype_of
from ..records import Batch, Call, Capture, Node, Plan, Subject
from .replay import LowStep, Step, failure_of_step, gradient_error, unscale

LOSS = "(loss)"
"""Stands for the loss in lists of module paths: the loss's operations belong to no module of the model."""

_PREFIX = "model"

FAITHFUL = 1e-3
"""Largest relative L2 difference between the recorded operations' gradients and the step's own that counts as equal."""


class TrainingStep(nn.Module):
    """Model and loss as one module, which returns the loss; `model` is the caller's own object.

    Gradients are always enabled, as in training, so that `detach` and `no_grad` have their effect.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, args: Any, kwargs: Any, targets: Any, named: Any) -> Any:
        """Compute the loss of one batch, a scalar tensor."""
        with torch.enable_grad():
            outputs = self.loss_inputs(self.model(*args, **kwargs))
            return own_loss(outputs) if self.loss_fn is None else self.loss_fn(outputs, *targets, **named)

    def loss_inputs(self, outputs: Any) -> Any:
        """The outputs that the loss function gets: those of the model, unless a subclass converts them."""
        return outputs


def own_loss(outputs: Any) -> Any:
    """`.loss` or `["loss"]` of the model's outputs, or the returned tensor itself; None without a loss."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
        return outputs.reshape(())
    return loss


def step_batches(subject: Subject) -> tuple[Batch, ...]:
    """Arguments of TrainingStep for every batch: the batch and its targets."""
    assert subject.objective is not None
    pairs = zip(subject.batches, subject.objective.targets, strict=True)
    return tuple(((args, kwargs, targets, named), {}) for (args, kwargs), (targets, named) in pairs)


def capture_step(subject: Subject, formats: tuple[str, ...], seed: int = 0) -> Capture:
    """The graph of model and loss in training mode; modules have their paths in the model, the loss the path LOSS.

    The caller has set training mode. Raises: CaptureError(slug="capture-failed").
    """
    assert subject.objective is not None
    step = TrainingStep(subject.model, subject.objective.loss_fn)
    captured = capture(replace(subject, model=step, batches=step_batches(subject)), formats, seed)
    if len(captured.outputs) != 1:
        raise CaptureError(f"{subject.name}: a training step must return one loss", slug="capture-failed")
    loss_fn = subject.objective.loss_fn
    nodes = {name: _node(node) for name, node in captured.nodes.items()}
    if name := _of_torch(loss_fn):
        nodes = {n: o if o.source or o.owner != LOSS else replace(o, called_from=name) for n, o in nodes.items()}
    aliases = {owner_of(path): tuple(map(owner_of, others)) for path, others in captured.aliases.items()}
    return replace(
        captured,
        nodes=nodes,
        placeholders=tuple(
            replace(place, fqn=place.fqn and in_the_model(place.fqn), holders=tuple(map(owner_of, place.holders)))
            for place in captured.placeholders
        ),
        aliases={path: others for path, others in aliases.items() if LOSS not in (path, *others)},
        # takes a model, not a step, so that callers use this capture like any other
        bind=lambda model, batch: captured.bind(TrainingStep(model, loss_fn), batch),
    )


def in_the_model(name: str) -> str:
    """A TrainingStep parameter's name in the model's own state dict."""
    return name.removeprefix(f"{_PREFIX}.")


def _of_torch(loss_fn: object) -> str | None:
    """The name of a torch loss, such as `torch.nn.functional.cross_entropy`; None for other losses."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    named = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    name, module = getattr(named, "__name__", None), getattr(named, "__module__", None) or ""
    if name is None or module.partition(".")[0] != "torch":
        return None
    home = "torch.nn" if isinstance(named, type) else "torch.nn.functional" if hasattr(F, name) else "torch"
    return f"{home}.{name}"


_ROOT = Call("", 0, "")


def _node(node: Node) -> Node:
    region = node.region
    if region is not None:
        region = replace(region, depth=region.depth + (-1 if _in_model(node.calls) else 1))
    calls = _calls(node.calls)
    function = node.function and replace(node.function, depth=len(calls))
    return replace(node, owner=owner_of(node.owner), calls=calls, region=region, function=function)


def _calls(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The module calls that enclose an operation, outermost first: the model, the loss for an operation in the
    loss, then submodules. The model encloses the loss too, since the model's precision determines the loss's dtype.
    """
    if _in_model(calls):
        return (_ROOT, *(replace(call, path=owner_of(call.path), depth=call.depth - 1) for call in calls[2:]))
    inner = (replace(call, path=owner_of(call.path), depth=call.depth + 1) for call in calls[1:])
    return (_ROOT, Call(LOSS, 1, LOSS), *inner)


def _in_model(calls: tuple[Call, ...]) -> bool:
    return len(calls) > 1 and calls[1].path == _PREFIX


def owner_of(path: str) -> str:
    """A TrainingStep module's path in the model; LOSS for a module outside the model."""
    return in_the_model(path) if path.startswith(f"{_PREFIX}.") else "" if path == _PREFIX else LOSS


@dataclass(frozen=True)
class StepPrecision:
    """The precision of a step: the model under a plan and the loss in FP32, or without a plan both under autocast.

    format "fp32": without any autocast region. handler: runs the operations, also on a GPU.
    """

    format: str
    plan: Plan | None = None
    handler: Handler | None = None

    @property
    def precision(self) -> PrecisionChoice:
        """The precision of each module by path, and of the loss by the path LOSS."""
        if self.plan is None:
            return PrecisionChoice(lambda path: self.format if path == LOSS else plain(self.format)(path))
        own = choice_from_scopes(self.plan.scopes)
        return replace(own, precision=lambda path: "fp32" if path == LOSS else own(path))


FP32 = StepPrecision("fp32")


def own_step(step: Step, low: StepPrecision, scale: float = 1.0) -> LowStep:
    """Run one step at a loss scale; return its loss and unscaled gradients. The caller has set training mode.

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


def use_own_gradients(step: Step) -> Step:
    """Replace the parameters' gradients of a recorded step by the gradients of the model's own step.

    Recorded and own gradients differ if the model has an autograd.Function, or hooks that change gradients. Raises:
    LoadError(slug="bad-loss") if the backward pass raises.
    """
    own = own_step(step, FP32)
    if own.failure is not None:
        raise LoadError(f"the training step raised in FP32: {own.failure}; fix the step first", slug="bad-loss")
    known = {name: gradient for name, gradient in own.gradients.items() if gradient is not None}
    result = {name: known.get(name, torch.zeros_like(leaf)) for name, leaf in step.by_parameter.items()}
    step.faithful = gradient_error(result, step.by_parameter) <= FAITHFUL
    step.by_parameter = result
    for place in step.capture.placeholders:
        if place.fqn in result:
            step.gradients[place.name] = [result[place.fqn]]
    return step


class _Region(TrainingStep):
    """A training step like the training loop that the report shows: a patched model opens its own autocast regions, and
    the loss is outside them."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, low: StepPrecision) -> None:
        super().__init__(model, loss_fn)
        self.low = low
        self.returned = "tensor"

    def forward(self, args: Any, kwargs: Any, targets: Any, named: Any) -> Any:
        """Compute the loss of one batch; if there is no plan, in an autocast region."""
        around: Any = nullcontext()
        if self.low.format != "fp32" and self.low.plan is None:
            around = torch.autocast(autocast_type(self.model, (args, kwargs)), dtype=dtype_of(self.low.format))
        with around:
            return super().forward(args, kwargs, targets, named)

    def loss_inputs(self, outputs: Any) -> Any:
        """The outputs, in FP32 if a plan may have changed their precision and a loss function reads them."""
        self.returned = "tensor"  # or "tensors": for a loss function; "attribute", "mapping": with the model's loss
        if not isinstance(outputs, torch.Tensor):
            own = "mapping" if getattr(outputs, "loss", None) is None else "attribute"
            self.returned = own if self.loss_fn is None else "tensors"
        return outputs if self.low.plan is None or self.loss_fn is None else _wide(outputs)


def _forward_and_backward(step: Step, module: _Region, low: StepPrecision, scale: float) -> LowStep:
    """Run a step. In FP32, the user's own autocast regions are ignored, as in the recording. In low precision, a step runs
    natively on a GPU and on a CPU as the target, and is emulated otherwise.

    A step with random operations is emulated there too, since low-precision kernels draw other random numbers than
    FP32 kernels.
    """
    around: AbstractContextManager[None] = emulate("cuda")
    if low.format == "fp32" or low.handler is not None:
        around = intercept(low.handler or Handler(), around=torch.float32 if low.format == "fp32" else None)
    elif step.is_native and not any(isinstance(n.target, PinnedDraw) for n in step.capture.graph_module.graph.nodes):
        around = nullcontext()
    args, kwargs = copy_batch(step.batch)
    with torch.enable_grad(), disable_fused_path(), around:
        loss = module(*args, **kwargs)
        gradients = _backward(loss, module, scale)
    step.returned = module.returned
    return LowStep(float(loss.detach()), gradients)


def _backward(loss: torch.Tensor, module: nn.Module, scale: float) -> dict[str, torch.Tensor | None]:
    """Run the backward pass and return unscaled gradients; the caller restores previous values of `grad`."""
    trainable = {in_the_model(n): p for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
    for parameter in trainable.values():
        parameter.grad = None
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    return {name: unscale(parameter.grad, scale) for name, parameter in trainable.items()}


def _wide(outputs: Any) -> Any:
    """Convert outputs to FP32 as the report's training code advises, also in dataclasses, which pytree skips."""

    def wide(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        result = copy(leaf)
        for item in fields(leaf):
            object.__setattr__(result, item.name, _wide(getattr(leaf, item.name)))
        return result

    return pytree.tree_map(wide, widen(outputs))
