"""One toy model with the nodes each rule must name on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from auditor.errors import AuditorError
from tests.support.capturing import Function


@dataclass(frozen=True)
class Case:
    """fires: every node a rule must name, by code. silent: rules that must name none.

    A rule that appears in neither is not looked at here.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    fires: Mapping[str, set[str]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if set(self.fires) & set(self.silent):
            raise AuditorError(f"case {self.name} wants a rule both to fire and to be silent", slug="bad-case")


def ramp(*shape: int, scale: float = 1.0) -> Tensor:
    """Evenly spaced numbers from -scale to scale: no randomness, no zeros for even counts."""
    count = torch.Size(shape).numel()
    return torch.linspace(-scale, scale, count).reshape(shape)


def on(function: Callable[..., object], *inputs: Tensor) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    """Model and inputs of a case that is a plain function."""
    return (lambda: Function(function)), inputs


def raised(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, where the author raises what it reads to FP32, and lowers what it gives."""

    def wide(*inputs: Tensor) -> Tensor:
        return function(*(x.float() if x.is_floating_point() else x for x in inputs)).to(inputs[0].dtype)

    return wide
