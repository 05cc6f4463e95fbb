"""Observes module calls, torch function calls, and reads of a tensor's dtype or values by Python, in a recorded run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ..isolation.members import named_modules
from ..numerics.functions import functions_by_name
from ..records import Call

_LOOKING = (
    "type element_size storage untyped_storage storage_type numpy __array__ __dlpack__ new new_tensor __repr__ __format__ "
    "__reduce_ex__ __deepcopy__"
)
TELLING: frozenset[Any] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "itemsize", "nbytes")),
        *(getattr(torch.Tensor, name) for name in _LOOKING.split()),
        torch.result_type,
    }
)
"""Torch functions that tell Python a tensor's dtype, or create another tensor in that dtype."""

_READING: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__repr__", "__format__")
)
"""Methods that pass a tensor's values to Python without the dispatcher."""


class Calls:
    """Tracks a model's running module calls. open: running calls, outermost first. A module that does not belong to the
    model is skipped: its operations count as its caller's. elsewhere: whether another thread called modules; operations
    of other threads are not recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.open: tuple[Call, ...] = (Call("", 0, ""),)
        self._returned: Callable[[Call, Any], None] | None = None
        self._paths = paths_of(model)
        self._stack: list[tuple[Call, ...]] = []
        self._count = 0
        self._thread = threading.get_ident()
        self.elsewhere = False

    def depth(self) -> int:
        """Number of running module calls, including the model's own."""
        return len(self.open)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            self.elsewhere = True
            return
        self._stack.append(self.open)
        path = self._paths.get(id(module), [""])[0]
        if path:
            self._count += 1
            # Global hooks receive only the positional arguments.
            given = (*args, *sys._getframe(1).f_locals.get("kwargs", {}).values())
            handed = any(isinstance(x, torch.dtype) and x.is_floating_point for x in given)
            self.open = (*self.open, Call(path, len(self.open), f"{path}#{self._count}", handed))

    def _leave(self, module: nn.Module, _: Any, result: Any) -> None:
        if self._stack and threading.get_ident() == self._thread:
            call, self.open = self.open[-1], self._stack.pop()
            if call not in self.open and self._returned is not None:
                self._returned(call, result)

    @contextmanager
    def watch(self, returned: Callable[[Call, Any], None]) -> Iterator[None]:
        """In the `with` block, module calls are tracked; `returned(call, result)` is called when a call ends."""
        self._returned = returned
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            self._returned = None  # the callback references the whole recording
            for handle in handles:
                handle.remove()


def paths_of(model: nn.Module) -> dict[int, list[str]]:
    """{id of a module: its dotted paths}; a shared module has several."""
    paths: dict[int, list[str]] = {}
    for path, module in named_modules(model):
        paths.setdefault(id(module), []).append(path)
    return paths


class Functions(TorchFunctionMode):
    """Observes calls of torch functions such as `F.softmax`; a nested call counts as part of the outer call. tell:
    called with each tensor that Python reads without the dispatcher. asked: whether Python read a dtype."""

    def __init__(self, calls: Calls, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._calls, self._tell, self._count = calls, tell, 0
        self._names = {function: name for name, functions in functions_by_name().items() for function in functions}
        self._open: Call | None = None
        self.asked = False
        self._thread = threading.get_ident()

    @property
    def open(self) -> Call | None:
        """The running torch function call; None if the call writes in place, or inside a module that it calls."""
        return self._open if self._open is not None and self._open.depth == self._calls.depth() else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = self._names.get(func)
        self.asked = self.asked or func in TELLING
        if func in _READING:
            self._tell(args[0])
        if name is None or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        self._count += 1
        outer, self._open = self._open, None
        if not kwargs.get("inplace") and kwargs.get("out") is None:
            self._open = Call(name, self._calls.depth(), f"{name}()#{self._count}")
        try:
            return func(*args, **kwargs)
        finally:
            self._open = outer
