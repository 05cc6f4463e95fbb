"""The table of facts: every one has a type, a unit and a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from auditor.rulebook.facts import FACTS, address_problem, fact_at, value_at
from tests.capturing import facts_of


def test_the_table_describes_every_fact() -> None:
    assert {"op", "reduction_length", "gemm_k", "eps", "headroom_bits"} <= FACTS.keys()
    assert all(fact.meaning and fact.type in {"text", "flag", "number", "texts", "numbers"} for fact in FACTS.values())
    assert FACTS["gemm_k"].unit == "elements"


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


def test_a_format_that_there_is_not() -> None:
    problem = address_problem("verdict.fp15")
    assert problem is not None
    assert problem.startswith("'fp15' is not one of ")
    assert "bf16" in problem


def test_facts_have_the_types_that_the_table_gives_them() -> None:
    kinds = {"text": str, "flag": bool, "number": (int, float), "texts": tuple, "numbers": tuple}
    for facts in facts_of(lambda x: (x @ x).softmax(-1), torch.ones(2, 2)).facts.values():
        for name, fact in FACTS.items():
            value = getattr(facts, name)
            if fact.by_format:
                assert isinstance(value, Mapping)
            else:
                assert value is None or isinstance(value, kinds[fact.type]), name
