"""Every way to write a cast to a floating dtype, as one operation."""

from __future__ import annotations

from typing import Any

import torch

from ..numerics.formats import format_of
from ..numerics.nodes import operation_of

_aten = torch.ops.aten


def as_cast(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """`aten.to.dtype` and its arguments for an operation that casts, the operation itself otherwise.

    Whoever records it moves the result to another device, where that is what the author asked for.
    """
    dtype = cast_to(op, given, args, kwargs)
    return (
        (_aten.to.dtype, (args[0], dtype), {})
        if dtype is not None and format_of(dtype) is not None
        else (op, args, kwargs)
    )


def cast_to(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """The dtype that an operation casts to, None for one that is no cast."""
    if not operation_of(op).cast:
        return None
    names = [argument.name for argument in op._schema.arguments]
    if "dtype" not in names:
        return given[-1].dtype if "other" in names else None
    place = names.index("dtype")
    return args[place] if place < len(args) else kwargs.get("dtype")


def is_no_cast(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """Whether an operation that kept the dtype of what it was given is no cast that its author wrote.

    Such is `x.to(device)`: torch hands on the dtype that x has.
    """
    moved = op is _aten.to.dtype_layout and cast_to(op, given, args, kwargs) is given[0].dtype
    return moved or cast_to(op, given, args, kwargs) is None
