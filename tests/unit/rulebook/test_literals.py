"""Literals against the formats: which of them a format cannot hold, loses, or takes for one."""

from __future__ import annotations

import pytest
import torch

from auditor.rulebook.values import as_one, beyond, formats_where
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


@pytest.mark.parametrize(
    ("literal", "name", "expected"),
    [
        # the smallest FP16 number is 2^-24; the tie at half of it goes to the even 0
        (2.0**-25, "fp16", (False, False)),
        (1.001 * 2.0**-25, "fp16", (False, False)),
        # below 1 FP16 spaces by 2^-11: the tie at half of it goes to the even 1
        (1 - 2.0**-12, "fp16", (False, True)),
        (1 - 1.001 * 2.0**-12, "fp16", (False, False)),
        # above 1 by 2^-10
        (1 + 2.0**-11, "fp16", (False, True)),
        (-65520.0, "fp16", (True, False)),
        (448.5, "fp8_e4m3", (True, False)),  # it saturates, and is beyond all the same
        (0.0, "fp16", (False, False)),
        (1.0, "fp16", (False, False)),
    ],
)
def test_one_literal_in_one_format(literal: float, name: str, expected: tuple[bool, bool]) -> None:
    assert (beyond(literal, name), as_one(literal, name)) == expected


def test_any_literal_will_do() -> None:
    assert formats_where(beyond, (1.0, 449.0)) == ("fp8_e4m3",)
    assert formats_where(beyond, ()) == ()
