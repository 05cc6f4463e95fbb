"""The table of facts: every one has a type, a unit and a meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from auditor.rulebook.facts import address_problem, fact_at, value_at
from tests.capturing import facts_of


def test_facts_by_format_have_addresses() -> None:
    toy = facts_of(torch.exp, torch.ones(2)).facts["exp"]
    given = replace(toy, verdict={"fp16": "unsafe"}, numel=2)
    assert (value_at(given, "verdict.fp16"), value_at(given, "verdict.bf16")) == ("unsafe", None)
    assert value_at(given, "numel") == 2
    assert (fact_at("verdict.fp16").type, fact_at("numel").unit) == ("text", "elements")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("numel", None),
        ("headroom_bits.bf16", None),
        ("headroom_bits", "'headroom_bits' is kept by format: name one, as in headroom_bits.fp16"),
        ("numel.fp16", "'numel' is not kept by format"),
        ("size", "'size' is not a fact"),
    ],
)
def test_what_is_wrong_with_an_address(address: str, expected: str | None) -> None:
    assert address_problem(address) == expected
