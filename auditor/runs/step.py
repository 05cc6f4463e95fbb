"""A training step as a module: the user's model and its loss, which any run can take in the model's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..records import Batch, Subject


class TrainingStep(nn.Module):
    """Model and loss as one module, which returns the loss; `model` is the caller's own object.

    Whoever runs it, gradients are on, as they are in training: `detach` and `no_grad` mean something.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, args: Any, kwargs: Any, targets: Any, named: Any) -> Any:
        """The loss of one batch, a scalar."""
        with torch.enable_grad():
            outputs = self.handed(self.model(*args, **kwargs))
            return own_loss(outputs) if self.loss_fn is None else self.loss_fn(outputs, *targets, **named)

    def handed(self, outputs: Any) -> Any:
        """What the loss is given of what the model returns."""
        return outputs


def own_loss(outputs: Any) -> Any:
    """`.loss` or `["loss"]` of what a model returns, or the returned tensor itself; None if there is none."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
        return outputs.reshape(())
    return loss


def step_batches(subject: Subject) -> tuple[Batch, ...]:
    """The subject's batches as TrainingStep takes them."""
    assert subject.objective is not None
    pairs = zip(subject.batches, subject.objective.targets, strict=True)
    return tuple(((args, kwargs, targets, named), {}) for (args, kwargs), (targets, named) in pairs)
