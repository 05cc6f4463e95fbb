"""Conditions over facts: how they evaluate where facts are known and where not, and how they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.rulebook.conditions import Condition, describe, evaluate, facts_used
from auditor.rulebook.facts import NodeFacts

FACTS = replace(
    NodeFacts(**dict.fromkeys(NodeFacts.__dataclass_fields__)),  # type: ignore[arg-type]
    op="aten.sum.default",
    upcast=False,
    reduction_length=100,
    consumers=("aten.mul.Tensor",),
    constants=(),
    headroom_bits={"fp16": 3.0, "bf16": 120.0},
    verdict={},
)


def leaf(fact: str, **comparisons: object) -> Condition:
    return Condition("fact", fact, comparisons)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (leaf("reduction_length", above=100), False),
        (leaf("reduction_length", at_least=100), True),
        (leaf("reduction_length", below=100), False),
        (leaf("reduction_length", at_most=100), True),
        (leaf("reduction_length", above=10, below=50), False),
        (leaf("reduction_length", is_in=(1, 100)), True),
        (leaf("op", matches="aten.sum.*"), True),
        (leaf("op", equals="aten.sum"), False),
        (leaf("upcast", equals=False), True),
        (leaf("consumers", contains="aten.mul*"), True),
        (leaf("consumers", contains="mul"), False),
        (leaf("constants", present=True), False),
        (leaf("eps", present=False), True),
        (leaf("reduction_length", present=True, above=100), False),
        (leaf("eps", above=0), None),
        (leaf("headroom_bits.fp16", below=4), True),
        (leaf("headroom_bits.bf16", below=4), False),
        (leaf("headroom_bits.fp8_e4m3", below=4), None),
        (leaf("headroom_bits.fp8_e4m3", present=False), True),
        (leaf("verdict.fp16", equals="unsafe"), None),
        (Condition("not", parts=(leaf("eps", above=0),)), None),
        (Condition("any", parts=(leaf("eps", above=0), leaf("upcast", equals=False))), True),
        (Condition("any", parts=(leaf("eps", above=0), leaf("upcast", equals=True))), None),
        (Condition("all", parts=(leaf("eps", above=0), leaf("upcast", equals=True))), False),
        (Condition("all", parts=()), True),
    ],
)
def test_conditions(condition: Condition, expected: bool | None) -> None:
    assert evaluate(condition, FACTS) is expected


@given(st.floats(allow_nan=True), st.sampled_from(["above", "at_least", "below", "at_most"]))
def test_a_comparison_with_nan_never_holds(bound: float, comparison: str) -> None:
    nan = replace(FACTS, output_max_abs=float("nan"))
    assert evaluate(leaf("output_max_abs", **{comparison: bound}), nan) is False


def test_a_condition_in_words() -> None:
    condition = Condition(
        "all",
        parts=(
            leaf("reduction_length", above=8),
            Condition("any", parts=(leaf("upcast", equals=False), leaf("op", matches="a*"))),
        ),
    )
    assert describe(condition) == "reduction_length above 8 elements, and (not upcast or op matches a*)"
    assert list(facts_used(condition)) == ["reduction_length", "upcast", "op"]


def test_what_is_known_reads_apart_from_what_holds() -> None:
    leaves = [leaf("eps", present=False), leaf("output_max_abs", present=True), leaf("constants", present=False)]
    assert [describe(item) for item in leaves] == ["unknown eps", "known output_max_abs", "no constants"]
