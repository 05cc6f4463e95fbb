"""What autocast makes of an operation's arguments."""

from __future__ import annotations

from typing import Any

import torch

from ..trees import tensors_in
from .carried import format_in
from .casting import lowered, raised
from .formats import FORMATS, Format
from .kernels import UnsupportedInFormat
from .operations import operation


def autocast_arguments(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], row: Format
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as autocast on CUDA hands them to `op`. Raises: UnsupportedInFormat for the banned ones."""
    known = operation(op)
    how = known.autocast
    if how == "banned":
        raise UnsupportedInFormat(f"{op} refuses to run under autocast")
    if how == "lower":
        row = FORMATS["fp16"] if row.autocast and known.only_fp16 else row
        return lowered(args, row), lowered(kwargs, row)
    if how == "fp32" or (how == "fp32_unless_dtype" and not _dtype_given(args, kwargs)):
        return raised(args), raised(kwargs)
    if how == "promote" and _widest(args, kwargs) is FORMATS["fp32"]:
        return raised(args), raised(kwargs)
    return args, kwargs


def _dtype_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, (torch.dtype, Format)) for value in (*args, *kwargs.values()))


def _widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Format | None:
    rows = [row for row in map(format_in, tensors_in((args, kwargs))) if row is not None]
    return max(rows, key=lambda row: row.bytes, default=None)
