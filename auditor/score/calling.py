"""The user's function called on a model, its numbers taken as they come; the model is afterwards what it was."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..isolation import isolated
from ..isolation.eager import uncompiled, unfused
from ..isolation.members import named_modules, named_parameters
from ..isolation.process import swapped
from ..loading.importer import as_script
from ..loading.sandbox import blame
from ..raised import let_through
from ..trees import tensors_in
from .function import Scoring

Told = Callable[[int], None]
"""Hears how many numbers there are so far."""

ALLOWED = "a score is a number, or an iterable of numbers, one for each sample or batch"


class Unscored(Exception):
    """The function gave no score; the message says why, in one line."""


@dataclass(frozen=True)
class Given:
    """What the function gave. single: one number, not an iterable. calls: how often the model was called for it."""

    values: tuple[float, ...]
    single: bool
    calls: int

    @property
    def counted(self) -> str:
        """How many numbers, in words."""
        if self.single:
            return "a single number"
        return f"{len(self.values):,} number{'s' * (len(self.values) != 1)}"


def given_by(
    scoring: Scoring,
    model: nn.Module,
    *,
    seed: int = 0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    most: int | None = None,
    limit: float | None = None,
    told: Told = lambda count: None,
) -> Given:
    """What the function gives for a model that runs inside `around()`, without gradients unless it switches them on.

    It begins from the seed; the model, the generators and the tensors that the function itself holds come back as they were.
    most: numbers beyond which there are more than are of use. limit: seconds.
    Raises: Unscored.
    """
    deadline, calls = math.inf if limit is None else time.monotonic() + limit, 0

    def in_time(count: int | None = None) -> None:
        if count is not None:
            told(count)
        if time.monotonic() > deadline:
            raise Unscored(f"the function gave no score within {limit:g} seconds")

    def called(module: nn.Module, args: Any) -> None:
        nonlocal calls
        if module is model:
            calls += 1
            in_time()

    kept = tensors_in([cell.cell_contents for cell in getattr(scoring.function, "__closure__", None) or ()])
    try:
        with isolated(model, scoring.function, kept, seed=seed), unfused(), uncompiled(), torch.no_grad(), around():
            with _importable(scoring), _heard(called):
                before = _made_of(model)
                values, single = _values(scoring.function(model), in_time, most)
                _check_same(before, _made_of(model))
            return Given(values, single, calls)
    except Unscored:
        raise
    except (Exception, SystemExit) as error:
        let_through(error, memory=False)
        raise Unscored(f"the function raised {blame(error)}") from error


@contextmanager
def _heard(called: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    hook = register_module_forward_pre_hook(called)
    try:
        yield
    finally:
        hook.remove()


def _made_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What a plan put into the model: its modules and how they run, its parameters and what they hold."""
    modules = {f"module {path!r}": (id(m), id(vars(m).get("forward"))) for path, m in named_modules(model)}
    # tensors made in inference mode count no writes
    written = {name: (x, 0 if x.is_inference() else x._version) for name, x in named_parameters(model)}
    return modules | {f"parameter {name!r}": (id(x), x.dtype, writes) for name, (x, writes) in written.items()}


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A function that changed the model says nothing of the plan. Raises: Unscored."""
    changed = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    if changed is not None:
        why = "so that what it says is of another one: have it only call the model"
        raise Unscored(f"the function changed the model ({changed}), {why}")


def number(value: Any, what: str) -> float:
    """A number as a float. Raises: Unscored for what is none, or is not finite."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if value.size != 1 if isinstance(value, np.ndarray | np.generic) else value.numel() != 1:
            raise Unscored(f"{what} is a tensor of shape {list(value.shape)}: {ALLOWED}")
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise Unscored(f"{what} is {_described(value)}: {ALLOWED}")
    if not math.isfinite(found := float(value)):
        raise Unscored(f"{what} is {found}: a score is finite")
    return found


def _values(given: Any, in_time: Callable[[int], None], most: int | None) -> tuple[tuple[float, ...], bool]:
    """The numbers in what the function returned, and whether it is one by itself."""
    if isinstance(given, torch.Tensor | np.ndarray) and given.ndim == 1:
        given = [given]
    elif isinstance(given, torch.Tensor | np.ndarray) or not _iterable(given):
        return (number(given, "what the function gave"),), True
    values: list[float] = []
    for item in given:
        values.extend(_of_item(item, len(values)))
        in_time(len(values))
        if most is not None and len(values) > most:
            raise Unscored(f"the function gave more numbers than in FP32, where it gave {most:,}: they are no pairs")
    if not values:
        raise Unscored(f"the function gave no number at all: {ALLOWED}")
    return tuple(values), False


def _of_item(item: Any, index: int) -> Iterator[float]:
    """The number of a sample or batch, or those in a tensor of one dimension."""
    flat = isinstance(item, torch.Tensor | np.ndarray) and item.ndim == 1
    for place, value in enumerate(item.tolist() if flat else [item]):
        yield number(value, f"number {index + place}")


def _iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Set)


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


@contextmanager
def _importable(scoring: Scoring) -> Iterator[None]:
    """What the function imports when it is called is found where its file lies."""
    place = scoring.place
    with swapped(sys, "path", list(sys.path)), as_script(place.script, place.folders) if place else nullcontext():
        yield
