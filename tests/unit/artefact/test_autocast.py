"""The strategy autocast: boundaries, a scope's call, and how a user runs it without a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.artefact.shipped import STRATEGIES, AutocastRuntime


@pytest.mark.parametrize(
    ("precision", "above", "expected"),
    [
        ("fp16", None, (None, None)),
        ("fp32", None, ("fp32", None)),
        ("fp32", "fp16", ("fp32", None)),  # autocast itself lowers what leaves it
        ("fp16", "fp32", (None, "fp32")),
        ("fp16", "input", (None, None)),
    ],
)
def test_boundaries(precision: str, above: str | None, expected: tuple[str | None, str | None]) -> None:
    assert (
        STRATEGIES["autocast"].boundary(precision, above, False)
        == STRATEGIES["autocast"].boundary(precision, above, True)
        == expected
    )


class Seen(nn.Linear):
    """Notes the dtype that it was given and the one that its product has."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.dtypes = (x.dtype, y.dtype)
        return y


def run(precision: str, output: str | None, x: Tensor) -> tuple[torch.dtype, ...]:
    layer = Seen(2, 2)
    result = AutocastRuntime.run(layer, None, precision, output, (x,), {})
    assert layer.weight.dtype is torch.float32
    return (*layer.dtypes, result.dtype)


def test_a_low_scope_lowers_its_products() -> None:
    low, wide = torch.bfloat16, torch.float32
    assert run("bf16", None, torch.ones(1, 2)) == (wide, low, low)
    assert run("bf16", "fp32", torch.ones(1, 2)) == (wide, low, wide)


def test_an_fp32_scope_raises_what_enters_and_lies_outside_of_autocast() -> None:
    wide = torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run("fp32", None, torch.ones(1, 2).bfloat16()) == (wide, wide, wide)


def test_nothing_is_stored_low() -> None:
    assert STRATEGIES["autocast"].stores == frozenset()
    assert AutocastRuntime.stored(nn.Linear(1, 1), {"": {"precision": "fp16"}}) == {}
