"""Every way by which Python gets at values is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.replaying import Model, replayed
from tests.support.subjects import normal

X = normal(2, 4)

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "comparison of numbers": lambda x: max(x[0].unbind(), key=lambda v: v * 2),
    "index": lambda x: [1, 2, 3][x.argmax() % 2],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: np.array(x.detach()),
    "of a view's data": lambda x: x[1].data.tolist(),
    "equal": lambda x: torch.equal(x, x * 2),
    "allclose": lambda x: torch.allclose(x, x * 2),
    "complex": lambda x: complex(x.sum()),
    "print": lambda x: str(x),
    "format": lambda x: f"{x.sum():.3f}",
    "in": lambda x: 0.5 in x,
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_noticed(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        READS[name](y)
        return y

    found = replayed(Model(forward), X, method="path")
    assert "the path these inputs take" in found.warnings[0]


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape[0] + len(x) + x.numel() + x.dim(),
    "dtype": lambda x: x.is_floating_point() and x.dtype is torch.float32,
    "iteration": lambda x: list(x),
    "device": lambda x: x.is_cuda or x.device,
    "identity": lambda x: x is not None,
    "contiguity": lambda x: x.is_contiguous(),
    "hash": lambda x: {x: 1},
}


@pytest.mark.parametrize("name", LOOKS)
def test_looks_at_anything_else_are_none(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        LOOKS[name](x)
        return x * 2

    replayed(Model(forward), X)
