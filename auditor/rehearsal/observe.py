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
from .result import ParameterSeries, RecipeRun

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
    object that calls the user's code. broken: in order of detection, FORWARD, BACKWARD or WEIGHT with an operation's
    number, words and module. Casts have no number of their own, since plans add casts."""

    def __init__(self, modules: list[str], outermost: CodeType) -> None:
        super().__init__()
        self._modules, self._outermost, self._count = modules, outermost, 0
        self.broken: list[tuple[str, int, str, str]] = []

    def enter(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for x in tensors_in((args, kwargs)):
            if x.requires_grad and torch._C._current_graph_task_id() == NO_PASS:
                hear = partial(self._hear, WEIGHT if x.is_leaf else BACKWARD, *self._describe(op))
                x.register_hook(hear)  # type: ignore[no-untyped-call]
        return super().enter(op, args, kwargs, region)

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        seen, result = self.seen, super().part(op, args, kwargs, region)
        if torch._C._current_graph_task_id() == NO_PASS:
            for x in filter(torch.is_floating_point, tensors_in(result)):
                self._hear(FORWARD, *self._describe(op), x.detach())
            self._count += self.seen - seen
        return result

    def _describe(self, op: Any) -> tuple[int, str, str]:
        name, module = getattr(op, "_opname", None) or getattr(op, "__name__", op), (self._modules or [LOSS])[-1]
        place = f" ({line_of(written.place)})" if (written := written_at(self._outermost)) else ""
        return self._count, f"{name}{f' in {module}' if module not in ('', LOSS) else ''}{place}", module

    def _hear(self, stage: str, number: int, words: str, module: str, value: torch.Tensor) -> None:
        with plain_torch():
            if not all_finite(value):
                self.broken.append((stage, number, words, module))


@contextmanager
def measure_update(
    series: ParameterSeries, optimizer: Optimizer, group: Mapping[str, Any], p: nn.Parameter, in_fp32: bool
) -> Iterator[None]:
    """Compare a parameter before and after the `with` block, in which the optimizer updates it. in_fp32: whether a
    remedy updates it in FP32, where the stored weight says nothing of single updates."""
    grad = dense(p.grad.detach())  # type: ignore[union-attr]
    before, moved, moment, moving = p.detach().clone(), grad != 0, _second_moment(optimizer, p), grad
    series.zero_gradient.append(1 - int(moved.count_nonzero()) / p.numel())
    series.decay_lost.append(_decay_lost(before.float() if in_fp32 else before, grad, group, type(optimizer)))
    if moment is not None:
        moment, moving = moment.clone(), (grad.float() ** 2 - moment).abs_() > STUCK * moment.float()
    yield
    with plain_torch():
        now = _second_moment(optimizer, p)
        series.updates_lost.append(None if in_fp32 else _share(p == before, moved))
        series.second_moment_stuck.append(None if moment is None or now is None else _share(now == moment, moving))
        series.second_moment_zero.append(None if now is None else _share(now == 0, moved))


def measure_gradients(run: RecipeRun, step: int, gradients: Gradients, fp32: Gradients) -> Gradients:
    """Record the relative L2 errors of a step's gradients: of all parameters together, and of each; None if FP32's are
    unknown or zero. fp32: FP32's gradients of this step; in an FP32 run, the gradients of the last sampled step.
    Returns the last known gradient of every parameter."""
    of_two = math.sqrt(2) if run.recipe.format == "fp32" else 1.0  # both batches' gradients scatter

    def error(names: list[str]) -> float | None:
        known = {name: torch.as_tensor(fp32[name]) for name in names if name in fp32}
        exact = output_error([*known.values()], [gradients[name] for name in known]) / of_two
        return exact if any(bool(x.any()) for x in known.values()) else None

    if gradients:
        run.steps.append(step)
        run.errors.append(error([*gradients]))
    for name in gradients:
        run.parameters[name].error.append(error([name]))
    return fp32 | gradients


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
