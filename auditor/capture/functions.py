"""Which call of a function of torch an operation is part of, as a mode of the same kind sees it that a patched model runs."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from torch.overrides import TorchFunctionMode

from ..numerics.functions import functions_by_name
from ..records import Call
from .asks import TELLING
from .calls import Calls


class Functions(TorchFunctionMode):
    """Sees the outermost calls of torch's functions; what these call is theirs."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls, self._count = calls, 0
        self._open: Call | None = None
        self.asked = False
        """Whether Python looked at a dtype."""
        self._thread = threading.get_ident()

    @property
    def open(self) -> Call | None:
        """The call that is open, unless a module was called in it."""
        return self._open if self._open is not None and self._open.depth == self._calls.depth() else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _names().get(func)
        self.asked = self.asked or func in TELLING
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


@cache
def _names() -> dict[Any, str]:
    return {function: name for name, functions in functions_by_name().items() for function in functions}
