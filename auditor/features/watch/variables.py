"""Values that user code changes from step to step: variables that the step reads, and attributes of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...numerics.entries import version_of
from .reads import Place

KINDS = (bool, int, float)
OWN = ("training", "call_super_init", "dump_patches")
"""Attributes of every module."""
SMALL = 1 << 20
"""Largest size in bytes of a tensor that is saved though it is not trained: a larger one is data, which the file loads."""


class Variables:
    """Numbers and tensors that a step reads by name, and numbers that are attributes of the user's own modules.

    Modules of torch keep no numbers that a step changes. places: see `places_read`.
    """

    def __init__(self, places: Sequence[Place], model: nn.Module) -> None:
        self._places = [one for one in places if one.cell is not None or _is_variable(one.get())]
        self._versions: dict[str, tuple[int, int]] = {}  # {name: (id, version)} of tensors when they were first seen
        for path, module in model.named_modules():
            if type(module).__module__.startswith("torch."):
                continue
            attributes = vars(module)
            for name, value in attributes.items():
                if type(value) in KINDS and name not in OWN:
                    self._places.append(Place(f"{path}.{name}", attributes, name))

    def values(self) -> dict[str, Any]:
        """{name: number or tensor} now. Attributes have the path of their module."""
        found: dict[str, Any] = {}
        for place in self._places:
            value = place.get()
            if type(value) in KINDS:
                found[place.name] = value
            elif isinstance(value, torch.Tensor) and _is_variable(value):
                found[place.name] = self._kept(place.name, value)
        return found

    def _kept(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A tensor without its graph; a copy of one that steps write to. The optimizer writes to a trained one, after
        the capsule was written."""
        known = self._versions.setdefault(name, (id(x), version_of(x)))
        is_written = known != (id(x), version_of(x)) and not x.requires_grad
        return x.detach().clone() if is_written else x.detach()

    def restore(self, values: Mapping[str, Any]) -> None:
        """Set the variables that have a value, wherever the user's code has them now."""
        for place in self._places:
            present = place.get()
            if place.name in values and (present is None or _is_variable(present)):
                _set(place, values[place.name])


def _is_variable(value: Any) -> bool:
    """Whether a value may change from step to step, and is saved."""
    if isinstance(value, torch.Tensor):
        is_trained = value.is_leaf and value.requires_grad
        is_small = value.layout is torch.strided and value.nbytes <= SMALL
        return type(value) in (torch.Tensor, nn.Parameter) and not value.is_inference() and (is_trained or is_small)
    return type(value) in KINDS


def _set(place: Place, value: Any) -> None:
    """Assign a value; a tensor keeps its place in memory, since an optimizer may know it."""
    present = place.get()
    if not isinstance(value, torch.Tensor):
        place.set(value)
    elif isinstance(present, torch.Tensor) and present.shape == value.shape:
        with torch.no_grad():
            present.detach().copy_(value)
    else:
        place.set(value.clone())
