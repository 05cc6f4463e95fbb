"""What an operation read, computed in and gave, from the tensors of one run of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..numerics.nodes import tensors_of
from ..records import Dtypes


def dtypes_of(arrived: Any, handed: Any, result: Any) -> Dtypes | None:
    """Dtypes of one operation; None where it gives no tensor. arrived, handed: see execute.Under."""
    given = tensors_of(result)
    if not given:
        return None
    inputs = tuple(dict.fromkeys(_name(x.dtype) for x in tensors_of(arrived)))
    output = given[0].dtype
    args, kwargs = handed
    told = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    return Dtypes(inputs, _name(output if told else _computed(tensors_of(handed) or given)), _name(output))


def _computed(handed: Sequence[torch.Tensor]) -> torch.dtype:
    """What torch promotes floating tensors to, those without dimensions giving way; discrete ones count where all are."""
    floating = [x for x in handed if x.is_floating_point() or x.is_complex()] or list(handed)
    deciding = [x for x in floating if x.dim()] or floating
    return functools.reduce(torch.promote_types, dict.fromkeys(x.dtype for x in deciding))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
