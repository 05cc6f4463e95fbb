"""A training step in low precision: what came of it, and the recorded step as it never ran, one operation or all of it low."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ..isolation import isolated
from ..numerics.casting import lowered
from ..numerics.entries import dense, is_plain
from ..numerics.formats import FORMATS
from ..numerics.metrics import output_error
from ..numerics.nodes import tensors_of
from ..raised import let_through
from .execute import Executor, Observe, Semantics, SomeLow
from .policy import Policy, plain
from .step import Step

RERUN_SCALE = 2.0**12

Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class LowStep:
    """One step's results. gradients: {parameter: FP32 gradient, unscaled, None where the loss does not reach it}.

    failure: why the step could not run, with no gradients then.
    """

    loss: float
    gradients: Gradients
    failure: str | None = None

    @property
    def finite(self) -> bool:
        """Whether GradScaler would take the step."""
        return all(bool(torch.isfinite(g).all()) for g in self.gradients.values() if g is not None)


def failed(error: Exception) -> LowStep:
    """A step that raised, with the first line of what it said."""
    lines = str(error).strip().splitlines() or [""]
    return LowStep(float("nan"), {}, lines[0][:200] or type(error).__name__)


def unscaled(gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """A gradient of the scaled loss as GradScaler hands it to the optimizer, in FP32."""
    return None if gradient is None else dense(gradient.detach()).float() / scale


def gradient_error(reference: Gradients, low: Gradients) -> float:
    """Relative L2 error of all parameter gradients together; inf where one is not finite."""
    pairs = [(ours, low.get(name)) for name, ours in reference.items() if ours is not None]
    return output_error([ours for ours, _ in pairs], [ours if theirs is None else theirs for ours, theirs in pairs])


def one_low(step: Step, name: str, format: str) -> LowStep:
    """The step with one operation in a format, forwards and backwards."""
    low = SomeLow(step.capture, {name}, format, lambda value: lowered(value, FORMATS[format]))
    return _replayed(step, low, RERUN_SCALE)


def spoilt(step: Step, format: str) -> dict[str, str]:
    """{operation: the first parameter with it} where all of the step is low: a finite gradient arrives at the operation,
    and what it hands back is not finite. Empty where the loss itself is not finite."""
    broken: set[str] = set()

    def told(name: str, gradient: torch.Tensor) -> None:
        if not bool(torch.isfinite(gradient).all()):
            broken.add(name)

    def observe(node: fx.Node, value: Any) -> None:
        for leaf in tensors_of(value) if node.op == "call_function" else ():
            if leaf.requires_grad and is_plain(leaf):
                leaf.register_hook(partial(told, node.name))  # type: ignore[no-untyped-call]

    captured = step.capture
    policy = Policy(captured, "cast", plain(format), format)
    low = _replayed(step, policy, 1.0, observe)
    lost = [n for n, g in low.gradients.items() if g is not None and not bool(torch.isfinite(g).all())]
    if low.failure is not None or not math.isfinite(low.loss) or not lost:
        return {}
    broken |= {place.name for place in captured.placeholders if place.fqn in lost}
    nodes = captured.nodes.values()
    return {n.name: lost[0] for n in nodes if n.name not in broken and not broken.isdisjoint(n.inputs)}


def _replayed(step: Step, policy: Semantics, scale: float, observer: Observe | None = None) -> LowStep:
    executor = Executor(step.capture.graph_module, policy, observer)
    names, leaves = list(step.parameters), list(step.parameters.values())
    try:
        with isolated(seed=step.seed), torch.enable_grad():
            loss = tensors_of(executor.run(*step.flat))[0].reshape(())
            found = torch.autograd.grad(loss * scale, leaves, allow_unused=True)
    except Exception as error:
        let_through(error)
        return failed(error)
    return LowStep(float(loss.detach()), {n: unscaled(g, scale) for n, g in zip(names, found, strict=True)})
