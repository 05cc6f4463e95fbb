"""Casts the arguments of an operation as CUDA's autocast does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .casting import format_in, round_tree, widen
from .entries import tensors_in
from .formats import FORMATS, Format
from .kernels import UnsupportedInFormat
from .operations import Operation, operation


def autocast_target(known: Operation, row: Format, given: Iterable[Format | None], told: bool) -> Format | None:
    """The format to which CUDA's autocast casts floating-point arguments; None for no cast.

    given: the formats of these arguments; told: whether the call passes a dtype. Raises: UnsupportedInFormat for
    operations that autocast forbids.
    """
    how, wide = known.autocast, FORMATS["fp32"]
    if how == "banned":
        raise UnsupportedInFormat(f"{known.op} cannot run under autocast")
    if how == "lower":
        return FORMATS["fp16"] if row.autocast and known.only_fp16 else row
    if how == "promote":
        return wide if max((each.bytes for each in given if each), default=0) == wide.bytes else None
    return wide if how == "fp32" or (how == "fp32_unless_dtype" and not told) else None


def autocast_arguments(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], row: Format
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast arguments of `op` as CUDA's autocast does. Raises: UnsupportedInFormat for ops that autocast forbids."""
    asks_dtype = any(isinstance(value, (torch.dtype, Format)) for value in (*args, *kwargs.values()))
    target = autocast_target(operation(op), row, map(format_in, tensors_in((args, kwargs))), asks_dtype)
    if target is None:
        return args, kwargs
    if not target.low:
        return widen(args), widen(kwargs)
    return round_tree(args, target), round_tree(kwargs, target)
