"""Tensors in a format: in torch's own type where torch computes in it, else float32 tensors that say whose values they hold."""

from __future__ import annotations

import torch

from .rounding import round_to
from .table import Format, format_of


class Carried(torch.Tensor):
    """A float32 tensor whose values are on the grid of `format`, in which torch does not compute.

    Whatever torch does with it gives a plain float32 tensor: it is for whoever runs operations to say what that is.
    """

    format: Format
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def in_format(x: torch.Tensor, row: Format) -> torch.Tensor:
    """A float tensor rounded to a format. Shapes: [*] -> [*]. In its own dtype, or carried in float32."""
    if row.native:
        return plain(x).to(row.dtype)
    if isinstance(x, Carried) and x.format is row:
        return x
    carried = round_to(x.float(), row.name).as_subclass(Carried)
    carried.format = row
    return carried


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor without a word on whose values it holds; others as they are."""
    return x.as_subclass(torch.Tensor) if isinstance(x, Carried) else x


def format_in(x: torch.Tensor) -> Format | None:
    """The format that a tensor's values are in: what it carries, or what torch computes in; None for other dtypes."""
    return x.format if isinstance(x, Carried) else format_of(x.dtype)


def asked_for(dtype: torch.dtype | Format | None) -> Format | None:
    """The format that stands in the place of a dtype: itself, or what torch computes in with that dtype."""
    return format_of(dtype) if isinstance(dtype, torch.dtype) else dtype


def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype of another, rounded to what that one carries."""
    row = format_in(other)
    return x.to(other.dtype) if row is None else in_format(x, row)
