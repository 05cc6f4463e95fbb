"""The recorded step again, as it never ran: one operation low and all else FP32, or everything cast."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from ..formats.table import FORMATS
from ..ops.casting import lowered, raised
from ..ops.kernels import run_op
from ..ops.nodes import target_of, tensors_of
from .execute import PolicyInterpreter, with_literals
from .lowstep import LowStep, failed, unscaled
from .step import Step
from .strategies import plain, running

RERUN_SCALE = 2.0**12


class _OneLow(fx.Interpreter):
    """Runs a capture in FP32 but for one operation, whose inputs, result and gradients are in a format."""

    def __init__(self, step: Step, name: str, format: str) -> None:
        super().__init__(step.capture.graph_module)
        self._name, self._row = name, FORMATS[format]
        self._literals = step.capture.nodes[name].literals.get(format)

    def run_node(self, n: fx.Node) -> Any:
        """The operation's result, in FP32. Raises: UnsupportedInFormat for the one that cannot run."""
        if n.name != self._name:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = with_literals(lowered(args, self._row), lowered(kwargs, self._row), self._literals)
        return raised(run_op(target_of(n), args, kwargs))


def one_low(step: Step, name: str, format: str) -> LowStep:
    """The step with one operation in a format, forwards and backwards."""
    return _replayed(_OneLow(step, name, format), step, RERUN_SCALE)


def spoilt(step: Step, format: str) -> dict[str, str]:
    """{operation: the first parameter with it} where all of the step is low: a finite gradient arrives at the operation,
    and what it hands back is not finite. Empty where the loss itself is not finite."""
    broken: set[str] = set()

    def told(name: str, gradient: torch.Tensor) -> None:
        if not bool(torch.isfinite(gradient).all()):
            broken.add(name)

    def observe(node: fx.Node, value: Any) -> None:
        for leaf in tensors_of(value) if node.op == "call_function" else ():
            if leaf.requires_grad:
                leaf.register_hook(partial(told, node.name))  # type: ignore[no-untyped-call]

    captured = step.capture
    low = _replayed(
        PolicyInterpreter(captured, running(captured, "cast", plain(format), format), observe), step, scale=1.0
    )
    lost = [n for n, g in low.gradients.items() if g is not None and not bool(torch.isfinite(g).all())]
    if low.failure is not None or not math.isfinite(low.loss) or not lost:
        return {}
    broken |= {place.name for place in captured.placeholders if place.fqn in lost}
    nodes = captured.nodes.values()
    return {n.name: lost[0] for n in nodes if n.name not in broken and not broken.isdisjoint(n.inputs)}


def _replayed(interpreter: fx.Interpreter, step: Step, scale: float) -> LowStep:
    names, leaves = list(step.parameters), list(step.parameters.values())
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(step.seed)
            loss = tensors_of(interpreter.run(*step.flat))[0].reshape(())
            found = torch.autograd.grad(loss * scale, leaves, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        return failed(error)
    return LowStep(float(loss.detach()), {n: unscaled(g, scale) for n, g in zip(names, found, strict=True)})
