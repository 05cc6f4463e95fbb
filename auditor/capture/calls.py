"""Which module calls are open while a model runs, told by hooks that torch keeps for all modules, not by its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..isolation.members import named_modules
from ..records import Call


class Calls:
    """The open calls of a model's modules, the root's first. A module that the model does not list counts as its caller.

    elsewhere: whether modules were called in another thread, where no operation is seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.open: tuple[Call, ...] = (Call("", 0, ""),)
        self._paths = first_paths(model)
        self._stack: list[tuple[Call, ...]] = []
        self._count = 0
        self._thread = threading.get_ident()
        self.elsewhere = False

    def depth(self) -> int:
        """How many are open, the root's among them."""
        return len(self.open)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            self.elsewhere = True
            return
        self._stack.append(self.open)
        path = self._paths.get(id(module), "")
        if path:
            self._count += 1
            self.open = (
                *self.open,
                Call(path, len(self.open), f"{path}#{self._count}", _handed((*args, *_keywords().values()))),
            )

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._stack and threading.get_ident() == self._thread:
            self.open = self._stack.pop()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the body the open calls are known."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _handed(arguments: Iterable[Any]) -> bool:
    return any(isinstance(x, torch.dtype) and x.is_floating_point for x in arguments)


def _keywords() -> Mapping[str, Any]:
    """Keyword arguments of the module call whose hook this is: hooks for all modules are told the positional ones alone."""
    found: Mapping[str, Any] = sys._getframe(2).f_locals.get("kwargs", {})
    return found


def first_paths(model: nn.Module) -> dict[int, str]:
    """{id of a module: its first path}."""
    found: dict[int, str] = {}
    for path, module in named_modules(model):
        found.setdefault(id(module), path)
    return found


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """{first path: the others} of every module that has several."""
    paths: dict[int, list[str]] = {}
    for path, module in named_modules(model):
        paths.setdefault(id(module), []).append(path)
    return {first: tuple(others) for first, *others in paths.values() if others}
