"""A subject on the device that the audit runs on; the caller's own model is not moved."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..devices import CPU, is_native
from ..errors import AuditorError
from ..records import Subject

_STORES = ("_parameters", "_buffers", "_modules")


def placed(subject: Subject, device: str) -> Subject:
    """The subject itself where all of it is on the CPU and stays there, else a copy of it on the device.

    Raises: AuditorError(slug="no-copy") where the model, or its loss, cannot be copied.
    """
    if not is_native(device) and not _on_others(subject.model):
        return subject
    memo: dict[int, Any] = {}
    model, objective = copied(subject.model, memo), subject.objective
    if objective is not None:
        loss_fn = _function(objective.loss_fn, memo)
        objective = replace(objective, loss_fn=loss_fn, targets=_moved(objective.targets, device))
    move = _Move(device, memo.values())
    move(model)
    if objective is not None:
        for held in _held(objective.loss_fn):
            move(held)
    return replace(
        subject,
        model=model,
        batches=_moved(subject.batches, device),
        held_out=_moved(subject.held_out, device),
        objective=objective,
    )


def _on_others(model: nn.Module) -> bool:
    found = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return bool(found - {CPU, "meta"})


def _moved(batches: Any, device: str) -> Any:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device).requires_grad_(x.requires_grad)

    return pytree.tree_map_only(torch.Tensor, move, batches)


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy that can be moved: none of its modules and parameters is the caller's. Raises: AuditorError("no-copy").

    memo: filled as copy.deepcopy fills it.
    """
    advice = "audit it with device='cpu'"
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise AuditorError(
            f"{type(module).__name__} cannot be copied to the GPU ({reason}): {advice}", "no-copy"
        ) from error
    own = {id(part) for part in (*module.modules(), *module.parameters())}
    if any(id(part) in own for part in (*twin.modules(), *twin.parameters())):
        raise AuditorError(
            f"copies of {type(module).__name__} share its modules or weights, so it cannot be moved to the GPU "
            f"without moving yours: {advice}",
            slug="no-copy",
        )
    return twin


def _function(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a loss, and of what it closes over: copy.deepcopy takes a function for one that holds nothing."""
    if isinstance(value, nn.Module):
        return copied(value, memo)
    if isinstance(value, partial):
        function = _function(value.func, memo)
        return partial(function, *copy.deepcopy(value.args, memo), **copy.deepcopy(value.keywords, memo))
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    cells = tuple(CellType(_function(cell.cell_contents, memo)) for cell in value.__closure__ or ())
    defaults = copy.deepcopy(value.__defaults__, memo)
    twin = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells or None)
    twin.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
    return twin


def _held(value: Any) -> list[Any]:
    """What a copy of a loss holds: itself, or its cells, defaults and arguments."""
    if isinstance(value, partial):
        return [*_held(value.func), *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = list(value.__closure__ or ())
        return [*(x for cell in cells for x in _held(cell.cell_contents)), *cells]
    return [value]


class _Move:
    """Puts the tensors of a copy on a device: those of modules, of their plain attributes, and of what these hold.

    copies: what copy.deepcopy made; nothing else is written to.
    """

    def __init__(self, device: str, copies: Iterable[Any]) -> None:
        self._device = device
        self._copies = {id(value) for value in copies}
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """The value itself, but for a tensor or a tuple of some."""
        if id(value) not in self._known:
            self._known[id(value)] = value, value
            self._known[id(value)] = value, self._moved(value)
        return self._known[id(value)][1]

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter):
                value.data = value.data.to(self._device)
                return value
            return value.detach().to(self._device).requires_grad_(value.requires_grad)
        if isinstance(value, nn.Module):
            value.to(self._device)
            for part in value.modules():
                self._attributes(vars(part))
        elif type(value) is tuple:
            return tuple(map(self, value))
        elif isinstance(value, CellType):
            value.cell_contents = self(value.cell_contents)
        elif id(value) in self._copies:
            self._inside(value)
        return value

    def _inside(self, value: Any) -> None:
        if isinstance(value, list):
            value[:] = map(self, value)
        elif isinstance(value, dict):
            value.update({key: self(item) for key, item in value.items()})
        elif hasattr(value, "__dict__"):
            self._attributes(vars(value))

    def _attributes(self, attributes: dict[str, Any]) -> None:
        attributes.update({name: self(item) for name, item in attributes.items() if name not in _STORES})
