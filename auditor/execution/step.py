"""One FP32 training step on the captured graph: every value, and the gradient of the loss with respect to it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..devices import NATIVE
from ..isolation import isolated
from ..isolation.process import under
from ..numerics.entries import dense, is_plain
from ..numerics.nodes import tensors_of
from ..raised import let_through
from ..records import Batch, Capture, Subject
from .execute import Apart, Executor


@dataclass
class Step:
    """A captured training step on one batch. flat: what the graph takes, parameters as leaves of their own.

    batch: what TrainingStep takes. parameters: {state-dict name: leaf}, a tied one once. live: {node: tensors inside the
    autograd graph}. gradients: {node or placeholder: one gradient or None per tensor}, of the loss, unscaled.
    by_parameter: {parameter: its gradient}, zeros where the loss does not depend on it. faithful: whether the recorded
    operations have the gradients of the model itself. returned: what the model hands to the loss, of records.Training.
    """

    capture: Capture
    subject: Subject
    batch: Batch
    flat: list[Any]
    parameters: dict[str, torch.Tensor]
    seed: int
    faithful: bool = True
    returned: str = "tensor"
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    env: dict[str, Any] = field(default_factory=dict)
    live: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    by_parameter: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether it runs natively."""
        return any(isinstance(x, torch.Tensor) and x.device.type in NATIVE for x in self.flat)


def bind_step(captured: Capture, subject: Subject, batch: Batch, seed: int) -> Step:
    """Copies of the model's parameters as leaves, and copies of everything else, ready to run.

    batch: as TrainingStep takes it. A tied parameter is one leaf; a frozen one requires no gradient.
    """
    leaves: dict[int, torch.Tensor] = {}
    parameters: dict[str, torch.Tensor] = {}
    flat = []
    for place, value in zip(captured.placeholders, captured.bind(subject.model, batch), strict=True):
        if isinstance(value, torch.Tensor):
            if id(value) not in leaves:
                trainable = place.kind == "parameter" and value.requires_grad and value.is_floating_point()
                leaves[id(value)] = value.detach().clone().requires_grad_(trainable)
                if trainable and place.fqn:
                    parameters[place.fqn] = leaves[id(value)]
            value = leaves[id(value)]
        flat.append(copy.copy(value) if not isinstance(value, torch.Tensor) else value)
    return Step(captured, subject, batch, flat, parameters, seed)


def run_step(step: Step, *, create_graph: bool = False) -> Step:
    """Forward and backward in FP32, from the seed; fills `loss`, `live` and `gradients`. The graph is kept.

    Where an operation has no derivative, as inside of an autograd.Function, there are no gradients.
    create_graph: the gradients can be differentiated again. Fused attention is then run as its parts, since its fused
    kernels have no second derivative. Raises: RuntimeError where an operation has none.
    """
    with isolated(seed=step.seed), torch.enable_grad(), _differentiable(create_graph):
        outputs = Executor(step.capture.graph_module, Apart(), partial(_keep, step)).run(*step.flat)
        step.loss = tensors_of(outputs)[0].reshape(())
        handles = [
            leaf.register_hook(_Store(step.gradients, name, index, len(leaves), create_graph))  # type: ignore[no-untyped-call]
            for name, leaves in step.live.items()
            for index, leaf in enumerate(leaves)
            if leaf.is_floating_point() and leaf.requires_grad and is_plain(leaf)
        ]
        leaves = list(step.parameters.values())
        found: Sequence[torch.Tensor | None]
        try:
            found = torch.autograd.grad(
                step.loss, leaves, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        except Exception as error:
            let_through(error)
            if create_graph:
                raise
            found = [None] * len(leaves)
        finally:
            for handle in handles:
                handle.remove()
    step.by_parameter = {
        name: torch.zeros_like(leaf) if gradient is None else dense(gradient)
        for (name, leaf), gradient in zip(step.parameters.items(), found, strict=True)
    }
    return step


def _keep(step: Step, n: fx.Node, result: Any) -> None:
    if n.op != "output":
        step.env[n.name] = result
        step.live[n.name] = tensors_of(result)


@dataclass
class _Store:
    """Keeps the accumulated gradient of one tensor."""

    gradients: dict[str, list[torch.Tensor | None]]
    name: str
    index: int
    count: int
    connected: bool

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        held = self.gradients.setdefault(self.name, [None] * self.count)
        held[self.index] = gradient.clone() if self.connected else dense(gradient.detach())
        return held[self.index] if self.connected else None  # what goes on backwards is what was kept


@contextmanager
def _differentiable(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    # cuDNN's recurrent layers have no second derivative.
    with under({"cudnn.enabled": False}), sdpa_kernel(SDPBackend.MATH):
        yield
