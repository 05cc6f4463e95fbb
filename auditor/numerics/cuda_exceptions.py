"""The registry of CUDA kernels that round otherwise than once: functions for the rules of cuda_kernels.toml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Given = Mapping[str, Any]
"""A kernel's arguments by name, with the schema's defaults."""

Rounding = Callable[[Given, torch.dtype], Any]
"""(arguments, low-precision dtype) -> the kernel's result, in its dtype."""

ROUNDINGS: dict[str, Rounding] = {}
"""{rule of an exception: the function that computes it}."""


def exception(*rules: str) -> Callable[[Rounding], Rounding]:
    """Register a function for rules of cuda_kernels.toml. Raises: KeyError if a rule is taken."""

    def register(function: Rounding) -> Rounding:
        for rule in rules:
            if rule in ROUNDINGS:
                raise KeyError(rule)
            ROUNDINGS[rule] = function
        return function

    return register


def rounder(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function, called r in the kernels, that rounds a float32 tensor to `dtype` and returns float32."""
    return lambda x: x.to(dtype).float()


def rounded_number(value: Any, dtype: torch.dtype) -> float:
    """A Python number converted to `dtype`; numbers beyond the range become infinite."""
    return float(torch.tensor(float(value), dtype=torch.float64).to(dtype))
