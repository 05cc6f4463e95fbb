"""Tensors in a format: in torch's own type where torch computes in it, else float32 tensors that say whose values they hold."""

from __future__ import annotations

import torch

from .rounding import round_to
from .table import Format, format_of

_MARK = "_carried_format"
"""Attribute of a float32 tensor whose values are on the grid of a format in which torch does not compute.

Whatever torch makes of such a tensor is another one, without it: whoever runs operations says what their results are.
"""


def in_format(x: torch.Tensor, row: Format) -> torch.Tensor:
    """A float tensor rounded to a format. Shapes: [*] -> [*]. In its own dtype, or carried in float32.

    Nested tensors are not carried, and stay as they are.
    """
    if x.is_nested and not x.is_contiguous():
        x = x.contiguous()  # torch converts no other
    if row.native:
        return plain(x).to(row.dtype)
    if x.is_nested or carried_in(x) is row:
        return x
    rounded = _rounded(plain(x).float(), row.name)
    setattr(rounded, _MARK, row)
    return rounded


def carried_in(x: torch.Tensor) -> Format | None:
    """The format that a float32 tensor says its values are in; None where it is what it is."""
    found: Format | None = getattr(x, _MARK, None)
    return found


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor without a word on whose values it holds; others as they are."""
    return x if carried_in(x) is None else x.detach()


def format_in(x: torch.Tensor) -> Format | None:
    """The format that a tensor's values are in: what it carries, or what torch computes in; None for other dtypes."""
    return carried_in(x) or format_of(x.dtype)


def asked_for(dtype: torch.dtype | Format | None) -> Format | None:
    """The format that stands in the place of a dtype: itself, or what torch computes in with that dtype."""
    return format_of(dtype) if isinstance(dtype, torch.dtype) else dtype


def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype of another, rounded to what that one carries."""
    row = format_in(other)
    return x.to(other.dtype) if row is None else in_format(x, row)


def _rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor rounded, of a sparse one the entries that it holds; never the tensor itself."""
    if x.layout is torch.strided:
        return round_to(x, name)
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        return torch.sparse_coo_tensor(x.indices(), round_to(x.values(), name), x.shape, is_coalesced=True)
    by_rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    inner, outer = (x.crow_indices(), x.col_indices()) if by_rows else (x.ccol_indices(), x.row_indices())
    return torch.sparse_compressed_tensor(inner, outer, round_to(x.values(), name), x.shape, layout=x.layout)
