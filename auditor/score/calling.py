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

from ..isolation import isolated
from ..isolation.eager import uncompiled, unfused
from ..isolation.process import swapped
from ..loading.importer import as_script
from ..loading.sandbox import blame
from ..raised import let_through
from ..trees import tensors_in
from .function import Scoring
from .watched import Changed, watched

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
    deadline = math.inf if limit is None else time.monotonic() + limit

    def in_time(count: int | None) -> None:
        if count is not None:
            told(count)
        if time.monotonic() > deadline:
            raise Unscored(f"the function gave no score within {limit:g} seconds")

    kept = tensors_in([cell.cell_contents for cell in getattr(scoring.function, "__closure__", None) or ()])
    try:
        with (
            _importable(scoring),
            isolated(model, scoring.function, kept, seed=seed),
            unfused(),
            uncompiled(),
            torch.no_grad(),
        ):
            with watched(model, lambda: in_time(None)) as calls, around():
                values, single = _values(scoring.function(model), in_time, most)
            return Given(values, single, calls.count)
    except (Unscored, Changed) as error:
        raise Unscored(str(error)) from error
    except (Exception, SystemExit) as error:
        let_through(error, memory=False)
        raise Unscored(f"the function raised {blame(error)}") from error


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
