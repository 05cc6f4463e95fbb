"""The state of a training before a step: its batch, its generators and variables, and the buffers of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...numerics.entries import version_of
from .encoding import local, over_batch, tensors_of
from .weights import plain_name


@dataclass
class Called:
    """A call of the step, or of the model, that may be saved. tensors: those of the batch, and their versions at its
    start. variables: see `Variables`. inputs: (module, args, kwargs) of its forward passes, if their random numbers
    are to be recorded."""

    batch: Any
    tensors: list[torch.Tensor]
    versions: list[int]
    generators: dict[str, Any]
    variables: dict[str, Any]
    inputs: list[Any] = field(default_factory=list)

    def is_written(self) -> bool:
        """Whether a tensor of the batch was written to since the call began."""
        return [version_of(x) for x in self.tensors] != self.versions

    def forget(self) -> None:
        """After the update: keep the batch alone, which a later capsule has for comparison."""
        self.generators = {}
        self.variables = {}
        self.inputs = []


def called(batch: Any, is_copied: bool, generators: dict[str, Any], variables: dict[str, Any]) -> Called:
    """A call that begins. is_copied: whether to copy the batch, since steps write to it. Without copies, tensors are kept
    by reference, without the graph that made them."""
    tensors = tensors_of(batch)
    if is_copied:
        batch = over_batch(lambda x: x.detach().clone(), batch)
    elif any(x.requires_grad for x in tensors):
        batch = over_batch(torch.Tensor.detach, batch)
    kept = tensors_of(batch) if is_copied else tensors
    versions = [version_of(x) for x in kept]
    return Called(batch, kept, versions, generators, variables)


@dataclass
class Group:
    """What belongs to one update: the calls since the last one, and what was heard in them.

    losses: of the backward passes since the last optimizer's update. returned: losses of calls without an update.
    updated: numbers of the optimizers that have updated. scaled: the last scaled loss, and the loss itself.
    """

    calls: list[Called] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    autocast: dict[str, str] = field(default_factory=dict)
    scaled: tuple[Any, Any] | None = None


class Buffers:
    """Copies of the buffers of a module that steps change, as they were before the step."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}".lstrip("."), owner, name)
            for path, owner in module.named_modules(remove_duplicate=True)
            for name in owner._buffers
        ]
        self._still: dict[str, tuple[int, int]] = {}  # {name: (id, version)} of buffers that no step has changed
        self._saved: dict[str, torch.Tensor] = {}
        self._is_first = True

    def _now(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, owner, key in self._places:
            buffer = owner._buffers.get(key)
            if buffer is not None and not has_no_entries(buffer):
                yield name, local(buffer)

    def save(self) -> None:
        """Before a step: copy the buffers that steps change, before the first step all of them."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, buffer in self._now():
            saved = self._saved.get(name)
            if saved is not None and saved.shape == buffer.shape and saved.dtype == buffer.dtype:
                targets.append(saved)
                sources.append(buffer)
            elif saved is not None or self._still.get(name) != (id(buffer), version_of(buffer)):
                self._saved[name] = buffer.detach().clone()
                self._still[name] = id(buffer), version_of(buffer)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def note_changes(self) -> None:
        """After the first step: drop the copies of buffers that it did not change."""
        if not self._is_first:
            return
        self._is_first = False
        for name, buffer in self._now():
            if self._still.get(name) == (id(buffer), version_of(buffer)):
                self._saved.pop(name, None)

    def before(self) -> dict[str, torch.Tensor]:
        """All buffers, as before the step."""
        values = {name: self._saved.get(name, buffer) for name, buffer in self._now()}
        return {plain_name(name): x.detach().cpu().clone() for name, x in values.items()}

    def put_back(self) -> None:
        """Set the buffers to their values before the step."""
        for name, buffer in self._now():
            if name in self._saved:
                buffer.copy_(self._saved[name])


def has_no_entries(x: torch.Tensor) -> bool:
    """Whether a tensor is empty, or of a lazy module that has not run yet."""
    is_lazy = type(x) is not torch.Tensor and isinstance(x, nn.UninitializedParameter | nn.UninitializedBuffer)
    return is_lazy or not x.numel()
