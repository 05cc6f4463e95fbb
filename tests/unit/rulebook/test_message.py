"""Messages of rules: which facts they show, and how they read."""

from __future__ import annotations

import pytest

from auditor.rulebook.message import facts_shown, filled

VALUES = {"op": "aten.sum", "headroom_bits.fp16": 1.25, "eps": None}


def test_the_facts_of_a_message_in_the_order_written() -> None:
    assert facts_shown("{op} has {headroom_bits.fp16:.1f} bits, {{op}}") == ["op", "headroom_bits.fp16"]


def test_addresses_are_filled_in_and_formatted() -> None:
    assert filled("{op}: {headroom_bits.fp16:.1f} bits", VALUES.__getitem__) == "aten.sum: 1.2 bits"


def test_what_is_not_known_reads_so_whatever_its_format() -> None:
    assert filled("{eps:.3g}", VALUES.__getitem__) == "unknown"


def test_what_is_no_template_raises() -> None:
    with pytest.raises(ValueError, match="expected '}'"):
        facts_shown("{op")
