"""Closures that optimizers call inside `step`: once, as SGD does, or several times, as LBFGS does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class RegionAround(torch.autocast):
    """The autocast region around an optimizer's `step`, entered again inside of it; none of the user's own."""


class Closure:
    """A closure as an optimizer calls it: in the autocast region around `step`, although updates run outside of it.

    before, after: called around each call of the user's function inside `step`. calls_once: whether later calls return the
    loss of the first.
    """

    def __init__(
        self, function: Callable[[], Any], before: Callable[[], None], after: Callable[[], None], calls_once: bool
    ) -> None:
        self._function, self._before, self._after = function, before, after
        self._calls_once = calls_once
        self._enabled, self._dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self._losses: list[Any] = []  # of the call before `step`, until the optimizer asks for it

    def call_before_step(self) -> None:
        """Call the function before the optimizer does, whose first call then returns this loss."""
        with torch.enable_grad():
            self._losses.append(self._function())

    def __call__(self) -> Any:
        if self._losses:
            return self._losses[0] if self._calls_once else self._losses.pop()
        self._before()
        with self._region():
            loss = self._function()
        self._after()
        return loss

    def _region(self) -> Any:
        if not self._enabled:
            return nullcontext()
        return RegionAround("cuda", dtype=self._dtype)


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a closure is among the arguments of an optimizer's `step`."""
    return any(map(callable, (*args, *kwargs.values())))


def wrap_closures(args: Any, kwargs: Any, wrap: Callable[[Any], Closure]) -> tuple[Any, Any, list[Closure]]:
    """The arguments of an optimizer's `step` with its closures wrapped, and these closures."""
    closures = list[Closure]()

    def replaced(value: Any) -> Any:
        if not callable(value):
            return value
        closures.append(wrap(value))
        return closures[-1]

    return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}, closures
