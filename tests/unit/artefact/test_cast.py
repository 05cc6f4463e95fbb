"""The strategy cast: boundaries, what is stored in which precision, a scope's call, and one `.half()` without a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.artefact.shipped import STRATEGIES, CastRuntime

LOW, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("precision", "above", "keeps", "expected"),
    [
        ("fp16", None, False, ("fp16", None)),
        ("fp32", "fp16", False, ("fp32", "fp16")),
        ("fp32", "fp16", True, ("fp32", None)),
        ("fp16", "fp32", False, ("fp16", "fp32")),
        ("fp32", "input", False, ("fp32", "input")),
    ],
)
def test_boundaries(precision: str, above: str | None, keeps: bool, expected: tuple[str | None, str | None]) -> None:
    assert STRATEGIES["cast"].boundary(precision, above, keeps) == expected


def test_weights_and_buffers_are_stored_by_scope() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    found = CastRuntime.stored(model, {"": {"precision": "fp16"}, "1": {"precision": "fp32"}})
    assert found[id(model[0].weight)] == "fp16"
    assert {found[id(buffer)] for buffer in model[1].buffers()} == {"fp32"}


def test_tied_weights_are_fp32_as_soon_as_one_of_their_modules_is() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[0].weight
    scopes = {"": {"precision": "fp16"}, "1": {"precision": "fp32"}}
    assert CastRuntime.stored(model, scopes) == {id(model[0].weight): "fp32"}


@pytest.mark.parametrize(
    ("given", "output", "expected"),
    [(WIDE, None, LOW), (WIDE, "fp32", WIDE), (WIDE, "input", WIDE), (LOW, "input", LOW), (LOW, "fp32", WIDE)],
)
def test_a_low_scope(given: torch.dtype, output: str | None, expected: torch.dtype) -> None:
    layer = nn.Linear(2, 2).to(LOW)
    result = CastRuntime.run(layer, None, "bf16", output, (torch.ones(1, 2, dtype=given),), {})
    assert result.dtype is expected
