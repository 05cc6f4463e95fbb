"""Interception by public parts of torch alone, for a torch that lacks the private ones.

One ordinary dispatch mode sees operations after autograd, in the dispatcher's last vocabulary: `addmm` for `linear`,
`_softmax` for `softmax`. Inference can be recorded and imitated under it; gradients of what it lowers are not right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..ops.nodes import mutates, operation_of, overload_named
from .handler import Handler, alone, uncompiled, unfused
from .regions import Region, one_stack, region_now


@contextmanager
def intercepted(handler: Handler, depth_of: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """See intercept.intercepted: `entering` and `part` of the handler are called for each operation.

    Autocast regions are kept apart from torch's own state: torch would cast before the mode sees an operation.
    """
    with ExitStack() as stack:
        stack.enter_context(alone())
        stack.enter_context(one_stack(depth_of, apart=True))
        stack.enter_context(unfused())
        stack.enter_context(uncompiled())
        stack.enter_context(_Last(handler))
        yield


class _Last(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operations as the dispatcher's last keys do."""

    supports_higher_order_operators = True

    def __init__(self, handler: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handler = handler

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a mode is on, and torch would import the compiler to say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, region = kwargs or {}, region_now()
        if _casts(region):
            with self:  # what autocast casts is seen as well
                args, kwargs = self.handler.entering(_known_as(func), args, kwargs, region)
        return self.handler.part(func, args, kwargs, region)


def _known_as(func: Any) -> Any:
    """The operation that autocast knows, for one that is a part of it."""
    name = "" if mutates(func) else operation_of(func).known_as
    return overload_named(name) if name else func


def _casts(region: Region) -> bool:
    return region.enabled and region.dtype != "float32"
