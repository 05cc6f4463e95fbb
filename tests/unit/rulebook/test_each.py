"""Rules about each format, made into one for every audited one that has none of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.numerics.formats import Format, registered
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


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 3).square()  # to 9e8: beyond all of them


@pytest.mark.parametrize("name", ["fp8_e5m2", "short1"])
def test_an_audit_in_it_has_its_finding(name: str) -> None:
    with registered(Format.ieee("short1", 4, 3)):
        audit = auditor.audit(Loud(), (torch.full((4,), 1e4),), formats=(name,), strategies=("cast",))
        found = [finding for finding in audit.findings if finding.rule == "MSR003"]
        verdicts = {report.node.name: report.verdicts[name] for report in audit.nodes}
    assert found
    assert {finding.formats for finding in found} == {(name,)}
    for finding in found:
        assert finding.agrees
        assert verdicts[finding.node].verdict == "unsafe"
        assert verdicts[finding.node].reason in finding.message
        assert {"fp8_e5m2": "FP8 E5M2", "short1": "SHORT1"}[name] in finding.message
