"""Operations on none of autocast's lists, whose kernels call products that are on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import auditor

X = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
PLACES = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1))

CALLS: dict[str, Callable[[], Tensor]] = {
    "affine_grid": lambda: F.affine_grid(PLACES, [2, 1, 4, 5], align_corners=False),
    "affine_grid of volumes": lambda: F.affine_grid(torch.eye(3, 4)[None], [1, 1, 2, 4, 5], align_corners=True),
    "cov": lambda: torch.cov(X),
    "corrcoef": lambda: torch.corrcoef(X),
    "matrix_power": lambda: torch.matrix_power(X, 3),
    "linalg.matrix_power": lambda: torch.linalg.matrix_power(X, 5),
    "linalg.pinv": lambda: torch.linalg.pinv(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_autocast_lowers_the_products_inside(name: str) -> None:
    """The CPU's own autocast does: these products are on its list, too."""
    call = CALLS[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        natively = call()
    with auditor.emulate(), torch.autocast("cpu", dtype=torch.bfloat16):
        emulated = call()
    assert emulated.dtype is natively.dtype is torch.bfloat16
    scale = float(natively.float().abs().max())
    assert torch.allclose(emulated.float(), natively.float(), rtol=1e-2, atol=1e-2 * scale)
