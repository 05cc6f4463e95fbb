"""Literals against the formats: which of them a format cannot hold, loses, or takes for one."""

from __future__ import annotations

import pytest
import torch

from tests.capturing import facts_of


@pytest.mark.parametrize(
    ("literal", "too_large", "one"),
    [
        (65504.0, ("fp8_e4m3", "fp8_e5m2"), ()),  # FP16's largest
        (65519.0, ("fp8_e4m3", "fp8_e5m2"), ()),  # rounds down to it; 65520 does not
        (65520.0, ("fp16", "fp8_e4m3", "fp8_e5m2"), ()),
        (
            3.4e38,
            ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"),
            (),
        ),  # BF16 ends at 3.3895e38, half a spacing on 3.396e38
        (449.0, ("fp8_e4m3",), ()),  # ends at 448, has no infinity
        (1 - 2**-11, (), ("bf16", "fp8_e4m3", "fp8_e5m2")),  # FP16's and TF32's neighbour of 1
        (1 - 1e-4, (), ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")),
        (1 + 2**-10, (), ("bf16", "fp8_e4m3", "fp8_e5m2")),
        (0.5, (), ()),
    ],
)
def test_literals_against_the_formats(literal: float, too_large: tuple[str, ...], one: tuple[str, ...]) -> None:
    facts = facts_of(lambda x: x * literal, torch.ones(2)).facts["mul"]
    assert (facts.constants_beyond, facts.constants_as_one) == (too_large, one)
