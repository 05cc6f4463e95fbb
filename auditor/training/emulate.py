"""A training step in low precision: the captured graph under the rules of a strategy, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ..fxnodes import target_of, tensors_of
from ..numerics.formats import LOW_DTYPES
from ..numerics.kernels import UnsupportedInFormat, lowered, raised, run_op
from ..records import Capture
from ..simulation.execute import DTYPES, FULL, PolicyInterpreter, with_literals
from ..simulation.strategies import plain, running

Watch = Callable[[str, int, torch.Tensor], None]
"""Hears of every gradient in a low format: the node, which of its results, and the gradient, still scaled."""

Precision = Callable[[str], str]
"""Precision of a module path, as `strategies.plain` and `strategies.scoped` give it."""


@dataclass(frozen=True)
class LowStep:
    """One step's results. gradients: {parameter: FP32 gradient, unscaled, None where the loss does not reach it}.

    failure: why the step could not run, with no gradients then.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor | None]
    failure: str | None = None

    @property
    def finite(self) -> bool:
        """Whether GradScaler would take the step."""
        return all(bool(torch.isfinite(g).all()) for g in self.gradients.values() if g is not None)


class Emulator:
    """Runs the loss of a captured step in low precision, as CUDA would, so that autograd can go back through it.

    On a CPU matrix products round their inputs, their results and, backwards, the gradients of both to the format, and
    sum in FP32; other operations run in the format itself, forwards and backwards.
    """

    def __init__(self, captured: Capture, strategy: str, format: str, precision_of: Precision | None = None) -> None:
        how = running(captured, strategy, precision_of or plain(format), format)
        self.watch: Watch | None = None
        self._run = PolicyInterpreter(captured, how, self._observe)

    @classmethod
    def of_regions(cls, captured: Capture) -> Emulator:
        """Of a model that carries its own scopes: what is low is what the autocast regions in the graph say."""
        made = cls(captured, "autocast", "fp16", plain("fp32"))
        made._run = PolicyInterpreter(captured, FULL, made._observe)
        return made

    def loss(self, flat: list[Any]) -> torch.Tensor:
        """The loss on the graph's inputs, a scalar connected to those that require gradients. Raises: RuntimeError
        and UnsupportedInFormat where an operation refuses the format."""
        with torch.enable_grad():
            return tensors_of(self._run.run(*flat))[0].reshape(())

    def _observe(self, node: fx.Node, value: Any) -> None:
        watch = self.watch
        if watch is None or node.op != "call_function":
            return
        for index, leaf in enumerate(tensors_of(value)):
            if leaf.dtype in LOW_DTYPES and leaf.requires_grad:
                leaf.register_hook(partial(_told, watch, node.name, index))  # type: ignore[no-untyped-call]


def _told(watch: Watch, name: str, index: int, gradient: torch.Tensor) -> None:
    watch(name, index, gradient)


class OneLow(fx.Interpreter):
    """Runs a capture in FP32 but for one operation, whose inputs, result and gradients are in a format."""

    def __init__(self, captured: Capture, name: str, format: str) -> None:
        super().__init__(captured.graph_module)
        self._name, self._dtype = name, DTYPES[format]
        self._literals = captured.constants.get(format, {}).get(name)

    def run_node(self, n: fx.Node) -> Any:
        """The operation's result, in FP32. Raises: UnsupportedInFormat for the one that cannot run."""
        if n.name != self._name:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = with_literals(lowered(args, self._dtype), lowered(kwargs, self._dtype), self._literals)
        return raised(run_op(target_of(n), args, kwargs))

    def loss(self, flat: list[Any]) -> torch.Tensor:
        """As Emulator.loss."""
        with torch.enable_grad():
            return tensors_of(self.run(*flat))[0].reshape(())


def low_step(
    emulator: Emulator | OneLow, flat: list[Any], parameters: Mapping[str, torch.Tensor], scale: float, seed: int
) -> LowStep:
    """Loss and unscaled gradients of one step at a loss scale; the leaves' own `.grad` stay as they are."""
    names, leaves = list(parameters), list(parameters.values())
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loss = emulator.loss(flat)
            found = torch.autograd.grad(loss * scale, leaves, allow_unused=True)
    except (UnsupportedInFormat, RuntimeError, NotImplementedError) as error:
        return LowStep(float("nan"), {}, str(error).strip().splitlines()[0][:200])
    gradients = {n: None if g is None else g.float() / scale for n, g in zip(names, found, strict=True)}
    return LowStep(float(loss.detach()), gradients)


def flushed_share(reference: Mapping[str, torch.Tensor], low: Mapping[str, torch.Tensor | None]) -> float:
    """Share of the entries that are not zero in FP32 and are zero in the low step."""
    lost, total = 0, 0
    for name, ours in reference.items():
        theirs = low.get(name)
        nonzero = ours != 0
        total += int(nonzero.sum())
        lost += int((nonzero & (theirs == 0)).sum()) if theirs is not None else 0
    return lost / total if total else 0.0


def gradient_error(reference: Mapping[str, torch.Tensor], low: Mapping[str, torch.Tensor | None]) -> float:
    """Relative L2 error of all parameter gradients together; inf where one is not finite."""
    gap, size = 0.0, 0.0
    for name, ours in reference.items():
        theirs = low.get(name)
        size += float(ours.double().square().sum())
        gap += float((theirs.double() - ours.double()).square().sum()) if theirs is not None else 0.0
    if not gap < float("inf"):
        return float("inf")
    return (gap / size) ** 0.5 if size else 0.0
