"""A training step as a module, which can run in the model's place; the recording uses the model's own paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..capture.capture import capture
from ..errors import CaptureError
from ..records import Batch, Call, Capture, Node, Subject

LOSS = "(loss)"
"""Owner name for operations of the loss, which belong to no module of the model."""

_PREFIX = "model"


class TrainingStep(nn.Module):
    """Model and loss as one module, which returns the loss; `model` is the caller's own object.

    Gradients are always enabled, as in training, so that `detach` and `no_grad` have their effect.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, args: Any, kwargs: Any, targets: Any, named: Any) -> Any:
        """The loss of one batch, a scalar."""
        with torch.enable_grad():
            outputs = self.loss_inputs(self.model(*args, **kwargs))
            return own_loss(outputs) if self.loss_fn is None else self.loss_fn(outputs, *targets, **named)

    def loss_inputs(self, outputs: Any) -> Any:
        """The loss's inputs, from the model's outputs."""
        return outputs


def own_loss(outputs: Any) -> Any:
    """`.loss` or `["loss"]` of the model's outputs, or the returned tensor itself; None if there is none."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
        return outputs.reshape(())
    return loss


def step_batches(subject: Subject) -> tuple[Batch, ...]:
    """The subject's batches as arguments of TrainingStep."""
    assert subject.objective is not None
    pairs = zip(subject.batches, subject.objective.targets, strict=True)
    return tuple(((args, kwargs, targets, named), {}) for (args, kwargs), (targets, named) in pairs)


def capture_step(subject: Subject, formats: tuple[str, ...], seed: int = 0) -> Capture:
    """The graph of model and loss in training mode; owners are the model's own paths, or `LOSS`.

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
    aliases = {_owner(path): tuple(map(_owner, others)) for path, others in captured.aliases.items()}
    return replace(
        captured,
        nodes=nodes,
        placeholders=tuple(
            replace(place, fqn=place.fqn and in_the_model(place.fqn), holders=tuple(map(_owner, place.holders)))
            for place in captured.placeholders
        ),
        aliases={path: others for path, others in aliases.items() if LOSS not in (path, *others)},
        # a model is bound, not a step, so that the capture is used as any other
        bind=lambda model, batch: captured.bind(TrainingStep(model, loss_fn), batch),
    )


def in_the_model(name: str) -> str:
    """A TrainingStep parameter's name in the model's own state dict."""
    return name.removeprefix(f"{_PREFIX}.")


def _of_torch(loss_fn: object) -> str | None:
    """The name of a torch loss: `torch.nn.CrossEntropyLoss`, `torch.nn.functional.cross_entropy`."""
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
    return replace(node, owner=_owner(node.owner), calls=calls, region=region, function=function)


def _calls(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """Calls around an operation: the model's root, or the root and the loss, and their inner calls.

    The model's root encloses the loss too, since it determines the loss's dtype.
    """
    if _in_model(calls):
        return (_ROOT, *(replace(call, path=_owner(call.path), depth=call.depth - 1) for call in calls[2:]))
    inner = (replace(call, path=_owner(call.path), depth=call.depth + 1) for call in calls[1:])
    return (_ROOT, Call(LOSS, 1, LOSS), *inner)


def _in_model(calls: tuple[Call, ...]) -> bool:
    return len(calls) > 1 and calls[1].path == _PREFIX


def _owner(path: str) -> str:
    if path == _PREFIX:
        return ""
    return path.removeprefix(f"{_PREFIX}.") if path.startswith(f"{_PREFIX}.") else LOSS
