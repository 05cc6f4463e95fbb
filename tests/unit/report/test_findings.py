"""Findings by cause, and what is said beside one: its facts, its plan, what keeping its module in FP32 would cost."""

from __future__ import annotations

from dataclasses import replace

from auditor.report.findings import causes
from tests.unit.report.factory import make_audit


def cause(audit, rule):
    return next(c for c in causes(audit).all if c.worst.rule == rule)


def test_cost_is_the_share_of_flops_inside_the_modules():
    audit = make_audit(60)
    owner = cause(audit, "RNG001").worst.owner
    total = sum(r.flops for r in audit.nodes)
    inside = sum(r.flops for r in audit.nodes if r.node.owner == owner)
    assert f"{inside / total:.0%} of the FLOPs" in cause(audit, "RNG001").cost
    assert "these" in cause(audit, "SFT001").cost


def test_a_module_without_flops_costs_casts_alone():
    audit = make_audit(60)
    owner = cause(audit, "RNG001").worst.owner
    nodes = tuple(replace(r, flops=0) if r.node.owner == owner else r for r in audit.nodes)
    assert "costs casts, and no FLOPs" in cause(replace(audit, nodes=nodes), "RNG001").cost


def test_the_root_has_no_cost_of_its_own():
    audit = make_audit(60)
    finding = replace(audit.findings[0], owner="")
    assert cause(replace(audit, findings=(finding,)), finding.rule).cost == ""


def test_an_operation_without_a_kernel_is_said_not_to_run():
    audit = make_audit(60)
    node = cause(audit, "RNG001").worst.node
    nodes = tuple(
        replace(r, errors={"fp16": replace(r.errors["fp16"], unsupported="no kernel")}) if r.node.name == node else r
        for r in audit.nodes
    )
    facts = dict(cause(replace(audit, nodes=nodes), "RNG001").facts)
    assert facts["in FP16"] == "does not run"
    assert "moves the output, FP16" not in facts


def test_findings_are_ranked_and_gathered_over_blocks():
    audit = make_audit()
    found = causes(audit).all
    assert found[0].worst.rule == "RNG001"  # the only error
    assert sum(len(c.members) for c in found) == len(audit.findings)
    softmax = next(c for c in found if c.worst.rule == "SFT001")
    assert (softmax.modules, softmax.where) == ({"blocks.{0-7}.attn": 8}, "blocks.{0-7}.attn")
    effects = {r.node.name: r.contributions["bf16"].isolated for r in audit.nodes if "bf16" in r.contributions}
    assert softmax.effect == max(effects[f.node] for f in softmax.members)
