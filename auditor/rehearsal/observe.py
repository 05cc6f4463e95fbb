"""Measures single steps: lost optimizer updates, gradient errors, and the first operation that gives Inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..capture.emulation import Emulation
from ..capture.regions import Region
from ..capture.source import line_of, written_at
from ..isolation.tensors import plain_torch
from ..numerics.entries import all_finite, dense, tensors_in
from ..numerics.metrics import output_error
from ..training.step import LOSS
from .result import RecipeRun

SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
DECOUPLED = ("Adafactor", "Muon")
"""Optimizers of torch whose weight decay multiplies the weights, although their parameter groups lack the flag
`decoupled_weight_decay`."""
STUCK = 0.01
"""Relative distance to the squared gradient below which a second moment need not change."""
FORWARD, BACKWARD, WEIGHT = "", "the backward pass of ", "the weight's gradient in "
NO_PASS = -1
"""Torch's id of the backward pass while no pass runs. Operations of a pass are not recorded: hooks check gradients."""

Gradients = dict[str, Any]
"""{name of a parameter: its gradient in FP32, flat, as a tensor or an array}."""


class Trail(Emulation):
    """Records where Inf or NaN appear. modules: names of the modules being called, innermost last. outermost: the code
    object that calls the user's code. operations: each in words, and its module. broken: (FORWARD, BACKWARD or WEIGHT;
    number of an operation), in order of detection."""

    def __init__(self, modules: list[str], outermost: CodeType) -> None:
        super().__init__()
        self._modules, self._outermost = modules, outermost
        self.operations: list[tuple[str, str]] = []
        self.broken: list[tuple[str, int]] = []

    def enter(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for x in tensors_in((args, kwargs)):
            if x.requires_grad and torch._C._current_graph_task_id() == NO_PASS:
                hear = partial(self._hear, WEIGHT if x.is_leaf else BACKWARD, len(self.operations))
                x.register_hook(hear)  # type: ignore[no-untyped-call]
        return super().enter(op, args, kwargs, region)

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        result = super().part(op, args, kwargs, region)
        if torch._C._current_graph_task_id() == NO_PASS:
            for x in filter(torch.is_floating_point, tensors_in(result)):
                self._hear(FORWARD, len(self.operations), x.detach())
            name, module = getattr(op, "_opname", None) or getattr(op, "__name__", op), (self._modules or [LOSS])[-1]
            place = f" ({line_of(written.place)})" if (written := written_at(self._outermost)) else ""
            self.operations.append((f"{name}{f' in {module}' if module not in ('', LOSS) else ''}{place}", module))
        return result

    def _hear(self, stage: str, number: int, value: torch.Tensor) -> None:
        with plain_torch():
            if not all_finite(value):
                self.broken.append((stage, number))


def first_to_blame(low: Trail, fp32: Trail) -> tuple[str, str | None]:
    """The first operation with Inf or NaN only in low precision, in words, and its module; ("", None) without one."""
    for stage, number in low.broken:
        if (stage, number) not in fp32.broken:
            words, module = low.operations[number]
            return f"{stage}{words}", module
    return "", None


class Updates:
    """Measures the first update of every parameter in one step. fp32: the known FP32 gradients of this step; in
    an FP32 run, the gradients of the last sampled step. gradients: the gradients of this step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], result: RecipeRun, fp32: Gradients) -> None:
        self.gradients = Gradients()
        self._result, self._fp32 = result, fp32
        self._names = {p: name for name, p in parameters.items()}

    @contextmanager
    def measure(self, optimizer: Optimizer, group: Mapping[str, Any], p: nn.Parameter) -> Iterator[None]:
        """Compare a parameter before and after the `with` block, in which the optimizer updates it."""
        name, grad = self._names.pop(p, None), dense(p.grad.detach())  # type: ignore[union-attr]
        if name is None:
            yield
            return
        self.gradients[name] = grad.to(torch.float32, copy=True).flatten()
        row, wide = self._result.parameters[name], bool({*self._result.recipe.remedies} - {"fp32_accumulation"})
        before, moved, moment, moving = p.detach().clone(), grad != 0, _second_moment(optimizer, p), grad
        row.zero_gradient.append(1 - int(moved.count_nonzero()) / p.numel())
        row.decay_lost.append(_decay_lost(before.float() if wide else before, grad, group, type(optimizer)))
        if moment is not None:
            moment, moving = moment.clone(), (grad.float() ** 2 - moment).abs_() > STUCK * moment.float()
        yield
        with plain_torch():
            now = _second_moment(optimizer, p)
            row.updates_lost.append(None if wide else _share(p == before, moved))
            row.second_moment_stuck.append(None if moment is None or now is None else _share(now == moment, moving))
            row.second_moment_zero.append(None if now is None else _share(now == 0, moved))

    def finish(self, step: int) -> Gradients:
        """Record the gradient errors of a step with finite gradients, of all parameters together and of each. Return
        the last known gradient of every parameter."""
        if self.gradients:
            self._result.steps.append(step)
            self._result.errors.append(self._error([*self.gradients]))
        for name in self.gradients:
            self._result.parameters[name].error.append(self._error([name]))
        return self._fp32 | self.gradients

    def _error(self, names: list[str]) -> float | None:
        """Relative L2 error of some parameters' gradients together; None if the FP32 gradients are unknown or zero."""
        known = [name for name in names if name in self._fp32]
        fp32 = [torch.as_tensor(self._fp32[name]) for name in known]
        error = output_error(fp32, [self.gradients[name] for name in known])
        of_two = math.sqrt(2) if self._result.recipe.format == "fp32" else 1.0  # both batches' gradients scatter
        return error / of_two if any(bool(x.any()) for x in fp32) else None


def _second_moment(optimizer: Optimizer, p: nn.Parameter) -> torch.Tensor | None:
    return next((v for k, v in optimizer.state.get(p, {}).items() if k in SECOND_MOMENTS), None)


def _share(flags: torch.Tensor, among: torch.Tensor) -> float | None:
    """The share of the entries in the mask `among` whose flag is set; None if the mask is empty."""
    whole = int(among.count_nonzero())
    return int((flags & among).count_nonzero()) / whole if whole else None


def _decay_lost(
    before: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any], kind: type[Optimizer]
) -> float | None:
    """Share of the weights that weight decay does not change. The result is None without weight decay, or for
    optimizers outside torch, whose decay is unknown."""
    decay, rate = float(group.get("weight_decay") or 0.0), float(group.get("lr", 0.0))
    if not decay or not rate or not kind.__module__.startswith("torch.optim"):
        return None
    if group.get("decoupled_weight_decay", kind.__name__ in DECOUPLED):
        return _share(before * (1 - rate * decay) == before, before != 0)
    return _share(grad + decay * before.to(grad.dtype) == grad, before != 0)
