"""The numbers that a tensor holds, as a plain tensor, whatever its layout and however it is viewed."""

from __future__ import annotations

import torch

ON_GPU = 1 << 24
"""Entries of a tensor that are looked at together on a GPU: few enough to need little memory, enough to keep it busy."""

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def entries(x: torch.Tensor) -> torch.Tensor:
    """The numbers in `x`, real and strided, 8-bit ones in float32; what is so already comes back as it is.

    Shapes: [*] -> [*], with a pair for each complex number [*, 2]; of a sparse tensor the entries that it holds, of a
    nested one those of its parts, one after the other.
    """
    if x.is_nested:
        parts = [part.reshape(-1) for part in x.unbind()]
        x = torch.cat(parts) if parts else x.new_zeros(0)
    elif x.layout is torch.sparse_coo:
        x = x.coalesce().values()
    elif x.layout is not torch.strided:
        x = x.values()
    x = x.resolve_neg()
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x  # FP8 has no arithmetic


def is_plain(x: torch.Tensor) -> bool:
    """Whether every one of its entries is stored where its strides say."""
    return x.layout is torch.strided and not x.is_nested


def is_number(x: torch.Tensor) -> bool:
    """Whether its entries are real or complex numbers, which formats round; on the meta device it has none."""
    return (x.is_floating_point() or x.is_complex()) and x.device.type != "meta"


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor with the zeros that a sparse one leaves out; others as they are."""
    return x if is_plain(x) else x.to_dense()


def places(x: torch.Tensor) -> list[torch.Tensor]:
    """Where a sparse tensor holds entries, as tensors of indices; of others nothing."""
    if is_plain(x) or x.is_nested:
        return []
    if x.layout is torch.sparse_coo:
        return [x.coalesce().indices()]
    return [x.crow_indices(), x.col_indices()] if x.layout in _BY_ROWS else [x.ccol_indices(), x.row_indices()]


def extent(x: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """What two tensors have in common whose entries can be compared one by one: shapes, of all parts of a nested one."""
    if x.is_nested:
        return tuple(tuple(part.shape) for part in x.unbind())
    return (tuple(x.shape),) if is_plain(x) else (tuple(x.shape), tuple(entries(x).shape))


def finite(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros where it is not finite."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
