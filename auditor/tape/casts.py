"""Every way to write a cast to a floating dtype, as one operation."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def as_cast(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """`aten.to.dtype` and its arguments for an operation that casts, the operation itself otherwise."""
    dtype = cast_to(op, given, args, kwargs)
    return (_aten.to.dtype, (args[0], dtype), {}) if dtype in _FLOATS else (op, args, kwargs)


def cast_to(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """The dtype that an operation casts to, None for one that is no cast."""
    if op is _aten.to.dtype:
        return args[1]
    if op is _aten.to.device:
        return args[2]
    if op is _aten.to.dtype_layout or op is _aten._to_copy.default:
        return kwargs.get("dtype")
    if op is _aten.to.other or op is _aten.type_as.default:
        return given[-1].dtype
    return None
