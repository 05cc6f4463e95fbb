"""`torch.cond` and `while_loop` as the Python that they stand for, where no compiler is to see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
