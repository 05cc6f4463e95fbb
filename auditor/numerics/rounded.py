"""Operations in a format that torch does not compute in: in float32 on values of the format, their results rounded to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..trees import over_tensors, tensors_in
from .carried import carried_in, format_in, in_format
from .casting import raised
from .formats import FORMATS, Format
from .nodes import operation_of, settled
from .operations import Operation


def promoted(given: Sequence[tuple[str, bool]]) -> str:
    """The format that torch promotes to. given: (format, whether it is a scalar) of each tensor, one at least.

    Scalars count where there is nothing else. Two low formats have float32 in common.
    """
    found = {name for name, scalar in given if not scalar} or {name for name, _ in given}
    low = {name for name in found if FORMATS[name].low}
    return max(sorted(found | ({"fp32"} if len(low) > 1 else set())), key=lambda name: FORMATS[name].bytes)


def asks_for_rounding(tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a format without arithmetic in torch is among the arguments: in one of their tensors, or as a dtype."""
    if any(carried_in(x) is not None for x in tensors):
        return True
    return any(isinstance(value, Format) for value in (*args, *kwargs.values()))


def rounding(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target(*args, **kwargs)`, computed in float32 on the values the arguments have; the result in the format it promotes to."""
    row = _result(operation_of(target), args, kwargs)
    wide = settled(target, target(*_wide(args), **_wide(kwargs)))
    if row is None or not row.low:
        return wide
    return over_tensors(lambda x: in_format(x, row) if x.dtype is torch.float32 else x, wide)


def _result(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Format | None:
    """The format of the floating results; None where a dtype among the arguments says, or no float tensor is there."""
    asked = next((value for value in (*args, *kwargs.values()) if isinstance(value, (Format, torch.dtype))), None)
    if asked is not None:
        return asked if isinstance(asked, Format) else None
    given = [(row.name, x.dim() == 0) for x in tensors_in((args, kwargs)) if (row := format_in(x)) is not None]
    if not given:
        return None
    return FORMATS[given[0][0] if operation.dtype_of_first else promoted(given)]


def _wide(tree: Any) -> Any:
    """The arguments in float32, which also stands where a format is asked for."""
    asked = {key: torch.float32 for key, value in _items(tree) if isinstance(value, Format)}
    wide = raised(tree)
    if isinstance(tree, dict):
        return {**wide, **asked}
    return tuple(asked.get(index, value) for index, value in enumerate(wide))


def _items(tree: Any) -> Iterable[tuple[Any, Any]]:
    return tree.items() if isinstance(tree, dict) else enumerate(tree)
