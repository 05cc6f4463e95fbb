"""Operations whose results have a shape that depends on values, and which of their arguments it depends on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..numerics.nodes import operation_of

_MASKS = (torch.bool, torch.uint8)


def shape_from(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Arguments whose entries the shape of the result depends on."""
    how, tagged = _how(op)
    if how == "masks":
        return _masks(args)
    if how == "classes":
        return () if len(args) > 1 and args[1] != -1 else (args[0],)
    if how == "second" and len(args) > 1:
        return (args[1],) if isinstance(args[1], torch.Tensor) else ()
    if how == "first" or (tagged and how != "sizes"):
        return tuple(x for x in args[:1] if isinstance(x, torch.Tensor))
    return ()


@cache
def _how(op: Any) -> tuple[str, bool]:
    """What an operation's row says of it, see SHAPE_FROM; and whether torch says that its first argument is one of them."""
    tagged = op is torch.ops.aten.where.default or torch.Tag.dynamic_output_shape in op.tags
    return operation_of(op).shape_from, tagged


def _masks(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Masks among the indices; where one number is put under them, it fits whatever they choose."""
    if len(args) > 2 and args[2].numel() == 1:
        return ()
    return tuple(x for x in args[1] if isinstance(x, torch.Tensor) and x.dtype in _MASKS)
