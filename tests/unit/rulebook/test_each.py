"""Rules about each format, made into one for every audited one that has none of its own."""

from __future__ import annotations

from auditor.rulebook.load import load_rules, spread

RULES = load_rules()


def about(formats: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    return {rule.formats: rule.code for rule in spread(RULES, formats) if rule.family == "measured"}


def test_every_audited_format_has_one_of_the_measurement() -> None:
    assert about(("fp16", "bf16")) == {("fp16",): "MSR001", ("bf16",): "MSR002"}
    found = about(("bf16", "fp8_e4m3", "fp8_e5m2"))
    assert {fmt: found[fmt,] for fmt in ("bf16", "fp8_e4m3", "fp8_e5m2")} == {
        "bf16": "MSR002",
        "fp8_e4m3": "MSR003",
        "fp8_e5m2": "MSR003",
    }
