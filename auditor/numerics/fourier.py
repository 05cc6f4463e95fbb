"""Fourier transforms of float16 numbers, as cuFFT has them: lengths are powers of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..trees import over_tensors, tensors_in
from .carried import in_format
from .casting import raised
from .formats import Format


def transformed(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format
) -> tuple[Any, list[int]]:
    """The transform, computed in float32 and rounded to the format; and the lengths that it transforms.

    What cuFFT rounds between its passes is not imitated.
    """
    result = target(*raised(args), **raised(kwargs))
    return over_tensors(lambda x: _rounded(x, row), result), _lengths(target, args, kwargs, result)


def _rounded(x: torch.Tensor, row: Format) -> torch.Tensor:
    if not x.is_complex():
        return in_format(x, row)
    return torch.view_as_complex(in_format(torch.view_as_real(x.resolve_conj()), row))


def _lengths(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> list[int]:
    """Lengths of a transform are those of its result; of the half spectrum of real numbers, that of those."""
    names = [argument.name for argument in target._schema.arguments]
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    x = tensors_in((args, kwargs))[0]
    sizes = _several(given.get("n", given.get("s")))
    dims = _several(given["dim"]) or list(range(-len(sizes), 0)) or list(range(x.dim()))
    lengths = [result.shape[d] for d in dims]
    if dims and result.is_complex() and not x.is_complex():
        lengths[-1] = sizes[-1] if sizes and sizes[-1] > 0 else x.shape[dims[-1]]
    return lengths


def _several(given: Any) -> list[int]:
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)
