"""Operations that CUDA has no half kernels for: what PyTorch's OpInfo says (`dtypesIfCUDA`), and nothing else."""

from __future__ import annotations

from functools import cache

from tests.support.opinfo import has_half

PARTS = {"_cdist_forward": "cdist", "_ctc_loss": "ctc_loss", "_linalg_eigh": "linalg_eigh", "_linalg_svd": "linalg_svd"}
"""Kernels that an operation is made of, which OpInfo has no name for."""


@cache
def half(packet: str, fmt: str) -> bool | None:
    """Whether CUDA takes tensors of the format; None where OpInfo does not say."""
    return has_half(PARTS.get(packet, packet), fmt)
