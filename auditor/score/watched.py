"""The calls of a model while it is scored, and whether the model that is called is still the one that was handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..isolation.members import named_modules, named_parameters


class Changed(Exception):
    """The function changed the model, so that its score says nothing of the plan."""


@dataclass
class Calls:
    """How often the model was called."""

    count: int = 0


@contextmanager
def watched(model: nn.Module, at_call: Callable[[], None]) -> Iterator[Calls]:
    """Count the calls of `model` in the body; `at_call()` comes before each.

    What a call itself changes is the model's own affair; what has changed from one to the next, the function changed.
    Raises: Changed, in the body, where that is a parameter, a module or how one runs.
    """
    calls, known = Calls(), _mark(model)

    def before(module: nn.Module, args: Any) -> None:
        if module is model:
            calls.count += 1
            at_call()
            _compare(known, _mark(model))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if module is model:
            known.clear()
            known.update(_mark(model))

    hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        yield calls
        _compare(known, _mark(model))
    finally:
        for hook in hooks:
            hook.remove()


_Mark = dict[str, tuple[Any, ...]]


def _mark(model: nn.Module) -> _Mark:
    """What a plan put into the model: its modules and how they run, its parameters and what they hold."""
    modules = {f"module {path!r}": (id(m), id(vars(m).get("forward"))) for path, m in named_modules(model)}
    return modules | {f"parameter {name!r}": (id(x), x.dtype, _version(x)) for name, x in named_parameters(model)}


def _version(x: torch.Tensor) -> int:
    """It grows with every write; tensors made in inference mode count none."""
    return 0 if x.is_inference() else x._version


def _compare(before: _Mark, now: _Mark) -> None:
    changed = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    if changed is not None:
        raise Changed(
            f"the function changed the model ({changed}), so that what it says is of another one: have it only call the model"
        )
