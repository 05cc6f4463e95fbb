"""What the records of the stages become in the audit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.api import audit


class Block(nn.Module):
    """Adds, and so stands with its operation; what it adds comes from modules that run nothing themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner["a"](x)


def test_classes_are_those_of_modules_around_others_that_run_nothing_themselves() -> None:
    model = nn.Sequential(Block(), Block())
    found = audit(model, torch.ones(2, 4), formats=("bf16",), strategies=("autocast",), device="cpu")
    assert found.classes == {"": "Sequential", "0.inner": "ModuleDict", "1.inner": "ModuleDict"}
    assert {report.node.owner for report in found.nodes} == {"0", "0.inner.a", "1", "1.inner.a"}
