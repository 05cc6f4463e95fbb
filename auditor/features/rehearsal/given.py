"""Names of the tensors that a step uses and does not make: parameters, buffers, and variables of the user's file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...capture.source import kind_of

DEPTH = 3
"""How deep lists, dicts and objects that hold tensors are searched."""
MOST = 1_000
"""Maximum number of values that are searched in one list or dict."""


def name_tensors(step: Callable[..., Any], modules: Iterable[nn.Module]) -> dict[int, str]:
    """{id of a tensor: its name for the user}, such as "`bank`" or "the buffer `norm.running_mean`"."""
    names = dict[int, str]()
    for path, x in named_tensors(step):
        names.setdefault(id(x), f"`{path}`")
    for module in modules:
        parts = (("the weight", module.named_parameters()), ("the buffer", module.named_buffers()))
        for what, tensors in parts:
            names |= {id(x): f"{what} `{path}`" for path, x in tensors}
    return names


def named_tensors(step: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the variables of a step: its closure, the globals that it reads, its object and its bound
    arguments; also inside lists, dicts and objects, and of functions of the user's that it calls."""
    seen = set[int]()
    for name, value in _variables(step, seen):
        yield from _tensors_of(name, value, DEPTH, seen)


def _variables(step: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The variables of a function, and of the functions among them."""
    if isinstance(step, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(step.args))
        yield from step.keywords.items()
        step = step.func
    owner = getattr(step, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        yield "self", owner
    if not callable(getattr(step, "__code__", step)) and not inspect.isroutine(step):
        return
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not inspect.isfunction(function) and kind_of(inspect.getfile(type(step))) == "own":  # a callable object
        yield "step", step
        function = type(step).__call__
    if not inspect.isfunction(function):
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    read = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    filled = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    for name, value in {**read, **filled}.items():
        if isinstance(value, functools.partial) or _is_own_function(value):
            yield from _variables(value, seen)
        else:
            yield name, value


def _is_own_function(value: Any) -> bool:
    return inspect.isfunction(value) and kind_of(value.__code__.co_filename) == "own"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _tensors_of(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    is_other = isinstance(value, type | nn.Module) or inspect.ismodule(value) or callable(value)
    if is_other or not depth or id(value) in seen:
        return
    seen.add(id(value))
    members: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        members = ((f"{name}[{key!r}]", one) for key, one in [*value.items()][:MOST])
    elif isinstance(value, list | tuple):
        members = ((f"{name}[{i}]", one) for i, one in enumerate(value[:MOST]))
    elif hasattr(value, "__dict__"):
        members = ((f"{name}.{key}", one) for key, one in [*vars(value).items()][:MOST])
    for path, one in members:
        yield from _tensors_of(path, one, depth - 1, seen)
