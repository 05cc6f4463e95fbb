"""The process that runs exported programs, from the inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.verify.programs import run_program
from auditor.verify.running import Answers

SETTINGS: dict[str, Any] = {"device": "cpu", "seed": 0, "gradients": True, "most": None}


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((600, 2), 10.0, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() @ self.weight).float()


def test_a_program_runs_as_on_a_gpu(tmp_path: Path) -> None:
    x = torch.full((1, 600), 10.0)
    torch.export.save(torch.export.export(Product(), (x,)), tmp_path / "mine.pt2")
    found = run_program(tmp_path / "mine.pt2", [((x,), {})], SETTINGS)
    assert isinstance(found, Answers)
    assert found.graded is not None
    assert found.outputs[0][0].tolist() == [[60000.0, 60000.0]]


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_a_file_that_is_none_is_a_reason(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.pt2").write_bytes(content)
    found = run_program(tmp_path / "mine.pt2", [((torch.ones(1),), {})], SETTINGS)
    assert isinstance(found, str)
    assert "\n" not in found
