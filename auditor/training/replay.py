"""Runs one training step on the recorded graph: in FP32, storing all activations and gradients, or in low precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from ..errors import first_line, let_through
from ..execution.execute import Executor, Observe, Semantics, SeparateResults, SubsetLowPrecision
from ..execution.policy import Policy, plain
from ..isolation import isolate
from ..numerics.casting import round_tree
from ..numerics.devices import CPU, NATIVE, target_type
from ..numerics.entries import dense, is_plain
from ..numerics.formats import FORMATS
from ..numerics.kernels import CUDA_ARITHMETIC
from ..numerics.metrics import output_error
from ..numerics.nodes import tensors_in
from ..records import Batch, Capture, Subject

Gradients = Mapping[str, torch.Tensor | None]
Watch = Callable[[str, int, torch.Tensor], None]
"""Callback for every gradient: (the node's name, the tensor's index in the node's result, the scaled gradient)."""


@dataclass
class Step:
    """A recorded training step on one batch. flat: the inputs of the graph, with parameters as separate leaves.

    batch: the arguments of TrainingStep. parameters: {state-dict name: leaf}, a tied parameter once. live: {node:
    tensors inside the autograd graph}. gradients: {node or placeholder: a gradient or None per tensor}, of the unscaled
    loss. by_parameter: {parameter: its gradient}, zeros if the loss does not depend on it. faithful: whether the
    recorded operations have the same gradients as the model. returned: see records.Training.
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
    def is_native(self) -> bool:
        """Whether the step runs natively: on a GPU, or on a CPU as the target."""
        return target_type() == CPU or any(isinstance(x, torch.Tensor) and x.device.type in NATIVE for x in self.flat)


def bind_step(captured: Capture, subject: Subject, batch: Batch, seed: int) -> Step:
    """Return a Step that is ready to run, with copies of the model's parameters as leaves.

    batch: the arguments of TrainingStep. A tied parameter is one leaf; a frozen parameter requires no gradient.
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


def run_step(step: Step) -> Step:
    """Run forward and backward in FP32 with the step's seed; store the results and the autograd graph in the step.

    If the backward pass raises, `by_parameter` has zeros.
    """
    outputs: Any = None
    with isolate(seed=step.seed), torch.enable_grad(), ExitStack() as hooks:
        executor = Executor(step.capture.graph_module, SeparateResults())
        for n, outputs in executor.steps(*step.flat):
            if n.op != "output":
                step.env[n.name] = outputs
                step.live[n.name] = tensors_in(outputs)
        step.loss = tensors_in(outputs)[0].reshape(())
        _keep_gradients(step, hooks)
        parameters = [*step.parameters.values()]
        result: Sequence[torch.Tensor | None]
        try:
            result = torch.autograd.grad(step.loss, parameters, retain_graph=True, allow_unused=True)
        except Exception as error:
            let_through(error)
            result = [None] * len(parameters)
    step.by_parameter = {
        name: torch.zeros_like(leaf) if gradient is None else dense(gradient)
        for (name, leaf), gradient in zip(step.parameters.items(), result, strict=True)
    }
    return step


def _keep_gradients(step: Step, hooks: ExitStack) -> None:
    """Store the accumulated gradient of every tensor that requires one, until `hooks` are closed."""

    def keep(name: str, index: int, gradient: torch.Tensor) -> None:
        of_node = step.gradients.setdefault(name, [None] * len(step.live[name]))
        of_node[index] = dense(gradient.detach())

    for name, leaves in step.live.items():
        for index, leaf in enumerate(leaves):
            if leaf.is_floating_point() and leaf.requires_grad and is_plain(leaf):
                hook = leaf.register_hook(partial(keep, name, index))  # type: ignore[no-untyped-call]
                hooks.callback(hook.remove)


@dataclass(frozen=True)
class LowStep:
    """Results of one low-precision step. gradients: {parameter: unscaled FP32 gradient, or None if missing}.

    failure: the exception's message if the step raised; a failed step has no gradients.
    """

    loss: float
    gradients: Gradients
    failure: str | None = None

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite, so that GradScaler would apply the update."""
        return all(bool(torch.isfinite(g).all()) for g in self.gradients.values() if g is not None)


def failure_of_step(error: Exception) -> LowStep:
    """The LowStep of a step that raised, with the first line of the exception's message."""
    return LowStep(math.nan, {}, first_line(error)[:200])


def unscale(gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """Convert the gradient of a scaled loss to FP32 and divide it by the scale."""
    return None if gradient is None else dense(gradient.detach()).float() / scale


def gradient_error(reference: Gradients, low: Gradients) -> float:
    """Relative L2 error of all parameter gradients together; inf if any is not finite; missing gradients count as
    exact."""
    pairs = [(ours, low.get(name)) for name, ours in reference.items() if ours is not None]
    return output_error([ours for ours, _ in pairs], [ours if theirs is None else theirs for ours, theirs in pairs])


def one_low(step: Step, name: str, format: str, scale: float) -> LowStep:
    """Replay the step with one operation in a format, forwards and backwards, at a loss scale."""
    low = SubsetLowPrecision(step.capture, {name}, format, lambda value: round_tree(value, FORMATS[format]))
    return _replay_step(step, low, scale)


def broken_gradients(step: Step, format: str) -> dict[str, str]:
    """Run the whole step in low precision. Returns {operation: the first parameter with a non-finite gradient} for
    operations that receive a finite gradient and return a non-finite one; empty if the loss is not finite."""
    broken: set[str] = set()

    def watch(name: str, index: int, gradient: torch.Tensor) -> None:
        if not bool(torch.isfinite(gradient).all()):
            broken.add(name)

    captured = step.capture
    low = hear_gradients(step, Policy(captured, "cast", plain(format), format), 1.0, watch)
    lost = [n for n, g in low.gradients.items() if g is not None and not bool(torch.isfinite(g).all())]
    if low.failure is not None or not math.isfinite(low.loss) or not lost:
        return {}
    broken |= {place.name for place in captured.placeholders if place.fqn in lost}
    nodes = captured.nodes.values()
    return {n.name: lost[0] for n in nodes if n.name not in broken and not broken.isdisjoint(n.inputs)}


def hear_gradients(step: Step, policy: Policy, scale: float, watch: Watch) -> LowStep:
    """Replay the step under a policy; `watch` is called with each gradient of an operation's result."""

    def observe(node: fx.Node, value: Any) -> None:
        for index, leaf in enumerate(tensors_in(value) if node.op == "call_function" else ()):
            if leaf.requires_grad and is_plain(leaf):
                leaf.register_hook(partial(watch, node.name, index))  # type: ignore[no-untyped-call]

    return _replay_step(step, policy, scale, observe)


def _replay_step(step: Step, policy: Semantics, scale: float, observer: Observe | None = None) -> LowStep:
    executor = Executor(step.capture.graph_module, policy, observer)
    names, leaves = list(step.parameters), list(step.parameters.values())
    try:
        with isolate(seed=step.seed), torch.enable_grad():
            loss = tensors_in(executor.run(*step.flat))[0].reshape(())
            with CUDA_ARITHMETIC:
                result = torch.autograd.grad(loss * scale, leaves, allow_unused=True)
    except Exception as error:
        let_through(error)
        return failure_of_step(error)
    return LowStep(float(loss.detach()), {n: unscale(g, scale) for n, g in zip(names, result, strict=True)})
