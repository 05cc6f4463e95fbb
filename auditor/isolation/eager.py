"""The model run as it was written: not compiled, no branch traced, none of PyTorch's fused paths."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch.utils import _pytree as pytree


@contextmanager
def eager_branches() -> Iterator[None]:
    """`torch.cond` can be run under vmap in the body: torch's rule expects of a branch what its compiler makes of it."""
    from torch._higher_order_ops.cond import cond_op

    table = cond_op.functorch_table
    known = table[TransformType.Vmap]
    table[TransformType.Vmap] = _in_rows
    try:
        yield
    finally:
        table[TransformType.Vmap] = known


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """The branch that is meant; under vmap both are taken, and of each row the one that is meant."""
    if _is_batched(pred):
        both = true_fn(*operands), false_fn(*operands)
        return pytree.tree_map(lambda a, b: torch.where(pred, a, b), *both)
    return true_fn(*operands) if pred else false_fn(*operands)


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, more: Any = ()) -> Any:
    """What is carried once the condition is false."""
    while cond_fn(*carried, *more):
        carried = body_fn(*carried, *more)
    return carried


def _in_rows(_: Any, *args: Any) -> Any:
    return cond(*args)


def _is_batched(condition: Any) -> bool:
    return isinstance(condition, torch.Tensor) and torch._C._functorch.is_batchedtensor(condition)


class _Fused:
    """PyTorch's fused transformer path, one for the process: closed by the first who asks for that, opened by the last."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, True

    def close(self) -> None:
        with self._lock:
            if not self._users:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._users += 1

    def open(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.backends.mha.set_fastpath_enabled(self._before)


_FUSED = _Fused()


@contextmanager
def unfused() -> Iterator[None]:
    """PyTorch's fused transformer path is off in the body, and as it was when the last such body has ended, in whatever thread."""
    _FUSED.close()
    try:
        yield
    finally:
        _FUSED.open()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled functions and TorchScript run as they were written: what compilers make of them would hide the operations.

    TorchScript writes its own casts into what it runs under autocast, in the dtype of the first such run, and keeps them.
    """
    cast = torch._C._jit_set_autocast_mode(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
            if "torch._dynamo" in sys.modules:  # else nothing has been compiled, and importing it takes a second
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(eager_branches())
            yield
    finally:
        torch._C._jit_set_autocast_mode(cast)
