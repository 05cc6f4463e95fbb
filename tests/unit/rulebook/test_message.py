"""Messages of rules: which facts they show, and how they read."""

from __future__ import annotations

from auditor.rulebook.rule import ByFormat, about, clauses, facts_shown, filled

VALUES = {"op": "aten.sum", "headroom_bits.fp16": 1.25, "eps": None}


def test_the_facts_of_a_message_in_the_order_written() -> None:
    assert facts_shown("{op} has {headroom_bits.fp16:.1f} bits, {{op}}") == ["op", "headroom_bits.fp16"]


def test_a_message_speaks_of_the_formats_it_is_asked_for_alone() -> None:
    message = "it raises in {formats}: [fp16: at 65504 in FP16]; [bf16: always in BF16]"
    assert clauses(message) == ["fp16", "bf16"]
    assert filled(message, VALUES.__getitem__, ("fp16", "bf16")) == (
        "it raises in FP16 and BF16: at 65504 in FP16; always in BF16"
    )
    assert filled(message, VALUES.__getitem__, ("fp16",)) == "it raises in FP16: at 65504 in FP16"
    assert filled(message, VALUES.__getitem__, ("bf16",)) == "it raises in BF16: always in BF16"


def test_a_fact_that_is_kept_by_format_is_shown_with_its_format() -> None:
    assert f"{ByFormat(fp16=0.5, bf16=4.0):.2g}" == "0.5 in FP16 and 4 in BF16"
    assert f"{ByFormat(bf16=None):.2g}" == "unknown in BF16"


def test_sentences_about_other_formats_are_left_out() -> None:
    text = "Numbers are apart. At 512 BF16 has\nmultiples of 4, FP16 of 0.5. They tie."
    assert about(text, ("fp16", "bf16"), ("fp16", "bf16")) == text
    assert about(text, ("bf16",), ("fp16", "bf16")) == "Numbers are apart. They tie."
