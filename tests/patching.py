"""The model and the plans that the tests of patching share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from auditor.patch.runtime import apply_plan
from tests.subjects import seeded


class Net(nn.Module):
    """Two children, a container, a buffer, a keyword and dtypes noted as they pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.norm(self.first(x))) * scale + self.shift


def scope(precision: str, output: str = "cast") -> dict[str, str]:
    return {"precision": precision, "output": output}


def plan(strategy: str, scopes: dict[str, dict[str, str]], fmt: str = "bf16") -> dict[str, Any]:
    return {"strategy": strategy, "format": fmt, "scopes": scopes}


AUTOCAST = plan("autocast", {"": scope("bf16"), "norm": scope("fp32"), "head.2": scope("fp32")})
CAST = plan("cast", {"": scope("bf16"), "norm": scope("fp32"), "head.2": scope("fp32", "keep")})
PLANS = {"autocast": AUTOCAST, "cast": CAST}


def patched(name: str) -> nn.Module:
    return apply_plan(seeded(Net), PLANS[name])
