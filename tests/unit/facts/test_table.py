"""The table of facts: every one has a type, a unit and a meaning."""

from __future__ import annotations

from auditor.facts import FACTS


def test_the_table_describes_every_fact() -> None:
    assert {"op", "reduction_length", "gemm_k", "eps", "headroom_bits"} <= FACTS.keys()
    assert all(fact.meaning and fact.type in {"text", "flag", "number", "texts", "numbers"} for fact in FACTS.values())
    assert FACTS["gemm_k"].unit == "elements"
