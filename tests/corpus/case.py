"""What a case of the corpus is: a failure people reported, its cause, and a twin that is fine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from auditor.numerics.metrics import disagreement, output_error
from tests.support.capturing import Function

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
Distance = Callable[[Sequence[Tensor], Sequence[Tensor]], float]

BOTH = ("fp16", "bf16")


@dataclass(frozen=True)
class Case:
    """One failure. Cast to any of `formats`, what `build` returns misses `tolerance`; what `twin` returns does not.

    culprits: (ATen operation, prefix of its owner), any of which is the cause. evidence: what shows the failure:
    "static" (the operation, a literal or a dtype), "value" (magnitudes), "param" (weights or buffers), "grad".
    tolerance: what `distance(reference, low)` may reach before people complained; NaN misses it. only_on_cpu: whether
    a GPU has the kernel for want of which it fails on a CPU.
    """

    name: str
    formats: tuple[str, ...]
    citation: str
    mechanism: str
    build: Build
    twin: Build
    culprits: tuple[tuple[str, str], ...]
    evidence: str = "value"
    distance: Distance = output_error
    tolerance: float = 0.05
    mode: str = "inference"
    only_on_cpu: bool = False


@dataclass(frozen=True)
class Trap:
    """Looks dangerous, and is fine in `formats`: cast as a whole, its outputs stay within `tolerance`."""

    name: str
    formats: tuple[str, ...]
    harmless_because: str
    build: Build
    tolerance: float = 0.02


def largest_error(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    """Largest absolute difference, in the unit of the outputs."""
    return max(float((r.double() - c.double()).abs().max()) for r, c in zip(reference, low, strict=True))


def not_finite(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    """Number of entries that are infinite or NaN."""
    return float(sum(int((~torch.isfinite(c)).sum()) for c in low))


def flipped(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    """Share of discrete results that differ."""
    return max(disagreement(r, c) for r, c in zip(reference, low, strict=True))


def coarse(x: Tensor) -> Tensor:
    """The values rounded to bfloat16: casting the inputs then costs nothing, and what fails is the model."""
    return x.bfloat16().float()


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return coarse(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> Tensor:
    return coarse(torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * (high - low) + low)


def linear(inputs: int, outputs: int, scale: float = 1.0, seed: int = 0) -> nn.Linear:
    """Without bias; an input of unit size gives an output of size `scale`."""
    layer = nn.Linear(inputs, outputs, bias=False)
    _fill(layer.weight, normal(outputs, inputs, scale=scale / math.sqrt(inputs), seed=seed + 7))
    return layer


def conv3x3(inputs: int, outputs: int, scale: float, seed: int = 0) -> nn.Conv2d:
    """Without bias, its weights of size `scale`."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    _fill(layer.weight, normal(outputs, inputs, 3, 3, scale=scale, seed=seed))
    return layer


def _fill(parameter: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def of(function: Callable[..., Any], **fixed: Any) -> nn.Module:
    """A function as a model, with some of its arguments fixed."""
    return Function(partial(function, **fixed))


class Inside(nn.Module):
    """A model of one named part, so that owners have a path."""

    def __init__(self, **part: nn.Module) -> None:
        super().__init__()
        ((self._name, module),) = part.items()
        self.add_module(self._name, module)

    def forward(self, *inputs: Tensor) -> Any:
        return self.get_submodule(self._name)(*inputs)
