"""What is said beside a finding: its facts, and what keeping its module in FP32 would cost."""

from __future__ import annotations

from dataclasses import replace

from auditor.report.findings import ranked
from tests.unit.report.factory import make_audit


def group(audit, rule):
    return next(g for g in ranked(audit) if g.worst.rule == rule)


def test_cost_is_the_share_of_flops_inside_the_modules():
    audit = make_audit(60)
    owner = group(audit, "RNG001").worst.owner
    total = sum(r.flops for r in audit.nodes)
    inside = sum(r.flops for r in audit.nodes if r.node.owner == owner)
    assert f"{inside / total:.0%} of the FLOPs" in group(audit, "RNG001").cost
    assert "these" in group(audit, "SFT001").cost


def test_a_module_without_flops_costs_casts_alone():
    audit = make_audit(60)
    owner = group(audit, "RNG001").worst.owner
    nodes = tuple(replace(r, flops=0) if r.node.owner == owner else r for r in audit.nodes)
    assert "costs casts, and no FLOPs" in group(replace(audit, nodes=nodes), "RNG001").cost


def test_the_root_has_no_cost_of_its_own():
    audit = make_audit(60)
    finding = replace(audit.findings[0], owner="")
    assert group(replace(audit, findings=(finding,)), finding.rule).cost == ""


def test_an_operation_without_a_kernel_is_said_not_to_run():
    audit = make_audit(60)
    node = group(audit, "RNG001").worst.node
    nodes = tuple(
        replace(r, errors={"fp16": replace(r.errors["fp16"], unsupported="no kernel")}) if r.node.name == node else r
        for r in audit.nodes
    )
    facts = dict(group(replace(audit, nodes=nodes), "RNG001").facts)
    assert facts["in FP16"] == "does not run"
    assert "moves the output, FP16" not in facts
