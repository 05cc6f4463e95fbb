"""Toy models become captures, ranges and facts; shared by the tests of facts, rules and findings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from auditor.capture.capture import capture
from auditor.records import Capture, Magnitudes, Subject
from auditor.rulebook.facts import NodeFacts
from auditor.rulebook.gather import gather


class Function(nn.Module):
    """A plain function as a model without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@dataclass(frozen=True)
class Captured:
    """A capture with the magnitudes of one FP32 run and the facts that follow."""

    capture: Capture
    ranges: dict[str, Magnitudes]
    facts: dict[str, NodeFacts]


def captured(model: nn.Module, *inputs: Tensor) -> Captured:
    """The model, in eval mode, on these inputs."""
    model = model.eval()
    batch = (inputs, {})
    traced = capture(Subject(model, (batch,), "toy", "toy.py", "toy", "toy"), ("fp16", "bf16"))
    recorder = _Recorder(traced.graph_module)
    with torch.no_grad():
        recorder.run(*traced.bind(model, batch))
    return Captured(traced, recorder.ranges, gather(traced, recorder.ranges))


def facts_of(function: Callable[..., Any], *inputs: Tensor) -> Captured:
    """The facts of a plain function on these inputs."""
    return captured(Function(function), *inputs)


class Seen(TorchDispatchMode):
    """The operations that are dispatched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Recorder(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.ranges: dict[str, Magnitudes] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        tensor = value[0] if isinstance(value, tuple) and value else value
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            sizes = tensor.abs()[torch.isfinite(tensor)]
            positive = sizes[sizes > 0]
            smallest = float(positive.min()) if positive.numel() else 0.0
            largest = float(sizes.max()) if sizes.numel() else 0.0
            self.ranges[n.name] = Magnitudes(largest, smallest, int((tensor == 0).sum()), {})
        return value
