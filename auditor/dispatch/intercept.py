"""The one place that leans on torch's private parts: a mode that sees operations whole, before autograd and autocast.

Tried on torch 2.11 and 2.13. Where a torch lacks one of these parts, `fallback.py` does what public modes can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, _higher_order_ops
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..trees import tensors_in
from .handler import Handler, alone, uncompiled, unfused
from .regions import Region, one_stack, region_now

_KEY = torch._C.DispatchKey.PreDispatch
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
if torch.cuda.is_available():
    _AUTOCAST = _AUTOCAST | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


@contextmanager
def intercepted(handler: Handler, depth_of: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """In the body every operation of this thread goes through `handler`.

    Autocast regions of every device type are one stack, PyTorch's fused transformer path is off (it reads weights past
    the modules that hold them), and compiled functions run eagerly.
    Raises: Busy, in another thread or in the body of another one.
    """
    with ExitStack() as stack:
        stack.enter_context(alone())
        for operator in list(_higher_order_ops.values()):
            _teach(operator)
        stack.enter_context(one_stack(depth_of))
        stack.enter_context(unfused())
        stack.enter_context(uncompiled())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(_Whole(handler))
        yield


class _Whole(SchemaCheckMode):  # type: ignore[no-untyped-call]
    """Sees operations before autograd and autocast; the slot that takes such a mode asks for this base class."""

    def __init__(self, handler: Handler) -> None:
        TorchDispatchMode.__init__(self, _KEY)  # type: ignore[no-untyped-call]
        self.handler, self.parts = handler, _Parts(handler)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a mode is on, and torch would import the compiler to say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        region = region_now()  # inside the guards below autocast always looks closed
        if _transformed(args, kwargs):
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST), self.parts.of(region):
                args, kwargs = self.handler.entering(func, args, kwargs, region)
                return func(*args, **kwargs)
        # Without the first guard RNNs take Python's decomposition, step by step.
        with torch._C._DisablePythonDispatcher(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return self.handler.whole(func, args, kwargs, region)


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees, below functorch, what the first mode let pass."""

    supports_higher_order_operators = True

    def __init__(self, handler: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handler, self.region = handler, Region(False, "")

    def of(self, region: Region) -> _Parts:
        """This mode, for an operation in `region`."""
        self.region = region
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a mode is on, and torch would import the compiler to say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return self.handler.part(func, args, kwargs or {}, self.region)


def _teach(operator: HigherOrderOperator) -> None:
    """Tell `torch.cond` and its like what to do under the first mode: run their bodies, whose operations it then sees."""
    if _Whole in operator.python_key_table:
        return

    def run(mode: _Whole, *args: Any, **kwargs: Any) -> Any:
        dense = operator.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        body = _BODIES.get(operator.name(), dense)  # type: ignore[no-untyped-call]
        if body is None:
            with mode.parts.of(region_now()):
                return operator(*args, **kwargs)
        with mode:
            return body(*args, **kwargs)

    operator.py_impl(_Whole)(run)


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, more: Any = ()) -> Any:
    while cond_fn(*carried, *more):
        carried = body_fn(*carried, *more)
    return carried


_BODIES: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop}
"""Operators whose own kernels refuse to run while a mode is active."""


def _transformed(args: Any, kwargs: Any) -> bool:
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(wrapped(x) for x in tensors_in((args, kwargs)))
