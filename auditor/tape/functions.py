"""Which call of a function of torch an operation is part of, as a mode of the same kind sees it that a patched model runs."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from torch.overrides import TorchFunctionMode

from ..ops.functions import functions_by_name
from ..records import Call, FunctionCall
from .asks import TELLING
from .calls import Calls


class Functions(TorchFunctionMode):
    """Sees the outermost calls of torch's functions; what these call is theirs."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls, self._count = calls, 0
        self._open: FunctionCall | None = None
        self._numbers: dict[tuple[str, str], int] = {}
        self.most: dict[tuple[str, str], int] = {}
        """{(module, function): the most calls of the one in a call of the other}, of modules in it too."""
        self.asked = False
        """Whether Python looked at a dtype."""
        self._thread = threading.get_ident()

    @property
    def open(self) -> FunctionCall | None:
        """The call that is open, unless a module was called in it."""
        return self._open if self._open is not None and self._open.depth == self._calls.depth() else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _names().get(func)
        self.asked = self.asked or func in TELLING
        if name is None or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        self._count += 1
        numbers = tuple(self._number(call, name) for call in self._calls.open)
        outer, self._open = self._open, None
        if not kwargs.get("inplace") and kwargs.get("out") is None:
            self._open = FunctionCall(name, self._calls.depth(), f"{name}()#{self._count}", numbers=numbers)
        try:
            return func(*args, **kwargs)
        finally:
            self._open = outer

    def _number(self, call: Call, name: str) -> int:
        found = self._numbers[call.key, name] = self._numbers.get((call.key, name), 0) + 1
        self.most[call.path, name] = max(self.most.get((call.path, name), 0), found)
        return found


@cache
def _names() -> dict[Any, str]:
    return {function: name for name, functions in functions_by_name().items() for function in functions}
