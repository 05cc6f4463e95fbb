"""A subject on the device that the audit runs on; the caller's own model is not moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..devices import CPU, NATIVE, is_native, is_spread
from ..errors import AuditorError, first_line
from ..isolation.answer import answer
from ..raised import device_failed, let_through
from ..records import Subject

_STORES = ("_parameters", "_buffers", "_modules")


def devices_of(model: nn.Module) -> set[str]:
    """Devices of its parameters and buffers, but for tensors without values."""
    return {str(x.device) for x in (*model.parameters(), *model.buffers()) if x.device.type != "meta"}


def placed(subject: Subject, device: str, seed: int = 0) -> Subject:
    """The subject itself where its model is on the device, or on several that it stays on; else a copy that is there.

    Raises: AuditorError(slug="no-copy") where the model, or its loss, cannot be copied, or does not run there.
    """
    here = devices_of(subject.model)
    if is_spread(device) or here <= {device} or (not is_native(device) and not here):
        return subject
    there = moved(subject, device)
    refused: Exception | None = None
    for inputs in _placements(subject, device):
        candidate = replace(there, **inputs)
        try:
            answer(candidate.model, candidate.batches[0], seed=seed)
        except Exception as error:
            if not device_failed(error):
                let_through(error)
            refused = refused or error
        else:
            return candidate
    assert refused is not None
    raise AuditorError(
        f"{subject.name} runs on {', '.join(sorted(here)) or CPU} and not on {device} "
        f"({type(refused).__name__}: {first_line(refused)[:160]}): audit it with "
        f"{'device=auto, where it is' if _natives(here) else 'device=cpu'}",
        slug="no-copy",
    ) from refused


def beside(subject: Subject) -> Iterator[Subject]:
    """Where the model is on a GPU: the subject with inputs there that came on the CPU."""
    device = next((str(x.device) for x in subject.model.parameters() if x.device.type in NATIVE), None)
    if device is not None:
        held = subject.objective
        objective = replace(held, targets=_inputs(held.targets, device)) if held is not None else None
        for inputs in _placements(subject, device):
            yield replace(subject, **inputs, objective=objective)


def _placements(subject: Subject, device: str) -> Iterator[dict[str, Any]]:
    """Inputs on the device; but for whole numbers, since lengths may have to stay on the CPU; as they are."""
    for wanted in (lambda x: True, torch.Tensor.is_floating_point, lambda x: False):
        yield {name: _inputs(getattr(subject, name), device, wanted) for name in ("batches", "held_out")}


def _natives(devices: Collection[str]) -> bool:
    return any(is_native(device) for device in devices)


def moved(subject: Subject, device: str) -> Subject:
    """A copy of the subject on the device, with all that its model, its loss and its inputs hold.

    Raises: AuditorError(slug="no-copy").
    """
    memo: dict[int, Any] = {}
    model, objective = copied(subject.model, memo, device), subject.objective
    if objective is not None:
        loss_fn = _function(objective.loss_fn, memo)
        objective = replace(objective, loss_fn=loss_fn, targets=_inputs(objective.targets, device))
    move = _Move(device, memo.values())
    move(model)
    if objective is not None:
        for held in _held(objective.loss_fn):
            move(held)
    return replace(
        subject,
        model=model,
        batches=_inputs(subject.batches, device),
        held_out=_inputs(subject.held_out, device),
        objective=objective,
        given=subject,
    )


def _inputs(batches: Any, device: str, wanted: Callable[[torch.Tensor], bool] = lambda x: True) -> Any:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device).requires_grad_(x.requires_grad) if wanted(x) else x

    return pytree.tree_map_only(torch.Tensor, move, batches)


def copied(module: nn.Module, memo: dict[int, Any] | None = None, device: str | None = None) -> nn.Module:
    """A copy that can be moved: none of its modules and parameters is the caller's. Raises: AuditorError("no-copy").

    memo: filled as copy.deepcopy fills it. device: parameters are copied there at once, and take no memory beside the caller's.
    """
    advice = "audit it with device='cpu'"
    memo = {} if memo is None else memo
    if device is not None:
        memo.update({id(x): _there(x, device) for x in module.parameters() if type(x) is nn.Parameter})
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


def sent(module: nn.Module, device: str) -> nn.Module:
    """The module itself, on a device; weights that were one stay one, which torch sees to on CUDA and not on every device."""
    groups: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            groups.setdefault(id(parameter), []).append((part, name))
    module.to(device)
    for (first, name), *others in groups.values():
        for part, other in others:
            part._parameters[other] = first._parameters[name]
    return module


def _there(parameter: nn.Parameter, device: str) -> nn.Parameter:
    data = parameter.data.to(device)
    own = data.clone() if data.data_ptr() == parameter.data_ptr() else data
    return nn.Parameter(own, parameter.requires_grad)


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
