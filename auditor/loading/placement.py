"""Copies a Subject (model and inputs) to the device of the audit; the caller's own model is not moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import AuditorError, describe, device_failed, let_through
from ..isolation.run_model import run_model
from ..numerics.devices import CPU, NATIVE, is_gpu, is_spread, type_of
from ..numerics.entries import over_tensors
from ..records import Subject

T = TypeVar("T")


def devices_of(model: nn.Module) -> set[str]:
    """Devices of a model's parameters and buffers, except meta tensors."""
    return {str(x.device) for x in (*model.parameters(), *model.buffers()) if x.device.type != "meta"}


def place_subject(subject: Subject, device: str, seed: int = 0) -> Subject:
    """The subject itself if its model is on the device, or remains on several devices; else a copy on the device.

    Raises: AuditorError(slug="no-copy") if the model, or its loss, cannot be copied, or does not run on the device.
    """
    here = devices_of(subject.model)
    there = {device} if is_gpu(device) else {CPU}
    if is_spread(device) or here <= there or (not is_gpu(device) and not here):
        return subject
    refused: Exception | None = None
    for candidate in move_subject(subject, device):
        try:
            run_model(candidate.model, candidate.batches[0], seed=seed)
            return candidate
        except Exception as error:
            if not device_failed(error):
                let_through(error)
            refused = refused or error
    assert refused is not None
    raise AuditorError(
        f"{subject.name} runs on {', '.join(sorted(here)) or CPU} and not on {device} "
        f"({describe(refused)}): audit the model "
        f"{'where it is, with device=auto' if any(map(is_gpu, here)) else 'with device=cpu'}",
        slug="no-copy",
    ) from refused


def with_moved_inputs(subject: Subject) -> Iterator[Subject]:
    """Variants of the subject with its inputs moved to the model's GPU, see `_with_inputs_on`; none for a CPU model."""
    device = next((str(x.device) for x in subject.model.parameters() if x.device.type in NATIVE), None)
    if device is not None:
        yield from _with_inputs_on(subject, device)


def move_subject(subject: Subject, device: str) -> Iterator[Subject]:
    """Copies of the subject with one copy of its model and loss, on the device; for the inputs see `_with_inputs_on`.

    Raises: AuditorError(slug="no-copy").
    """
    memo: dict[int, Any] = {}
    model, objective = copy_to_device(subject.model, device, memo), subject.objective
    if objective is not None:
        objective = replace(objective, loss_fn=copy_to_device(objective.loss_fn, device, memo))
    yield from _with_inputs_on(replace(subject, model=model, objective=objective, given=subject), device)


def _with_inputs_on(subject: Subject, device: str) -> Iterator[Subject]:
    """Variants of the subject, in the order to try: all inputs on the device; all except integers (lengths may need the
    CPU); none. The targets of the loss are on the device."""
    objective = subject.objective
    if objective is not None:
        objective = replace(objective, targets=_inputs(objective.targets, device))
    for wanted in (lambda x: True, Tensor.is_floating_point, lambda x: False):
        batches, held_out = (_inputs(given, device, wanted) for given in (subject.batches, subject.held_out))
        yield replace(subject, batches=batches, held_out=held_out, objective=objective)


def copy_to_device(value: T, device: str, memo: dict[int, Any] | None = None) -> T:
    """Deep-copy a model or a loss to the device; the copy shares nothing with the original.

    memo: the memo of copy.deepcopy. Raises: AuditorError(slug="no-copy").
    """
    try:
        with _Onto(device):
            twin: T = _copy(value, {} if memo is None else memo)
        if not isinstance(value, nn.Module) or not isinstance(twin, nn.Module):
            return twin
        own = {id(part) for part in (*value.modules(), *value.parameters())}
        if any(id(part) in own for part in (*twin.modules(), *twin.parameters())):
            raise ValueError("a copy shares modules or weights with the original")
        return twin.to(device)  # for modules that override `to`
    except Exception as error:
        let_through(error)
        raise AuditorError(
            f"cannot copy {type(value).__name__} to {type_of(device)} ({describe(error)}): audit the model with device='cpu'",
            slug="no-copy",
        ) from error


class _Onto(TorchFunctionMode):
    """Context in which copy.deepcopy copies tensors to a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:  # deepcopy of a parameter calls it
            return args[0].to(self._device, copy=True)
        if func is Tensor.__deepcopy__ and type(args[0]) is Tensor:
            x, memo = args
            memo[id(x)] = x.detach().to(self._device, copy=True).requires_grad_(x.requires_grad)
            return memo[id(x)]
        return func(*args, **(kwargs or {}))


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """copy.deepcopy, but a function is copied too, with the variables that it closes over."""
    if isinstance(value, partial):
        function = _copy(value.func, memo)
        return partial(function, *copy.deepcopy(value.args, memo), **copy.deepcopy(value.keywords, memo))
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    cells = tuple(CellType(_copy(cell.cell_contents, memo)) for cell in value.__closure__ or ())
    defaults = copy.deepcopy(value.__defaults__, memo)
    twin = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells or None)
    twin.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
    return twin


def _inputs(batches: Any, device: str, wanted: Callable[[Tensor], bool] = lambda x: True) -> Any:
    def move(x: Tensor) -> Tensor:
        return x.detach().to(device).requires_grad_(x.requires_grad) if wanted(x) else x

    return over_tensors(move, batches)
