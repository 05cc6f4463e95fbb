"""Where errors begin: births and heirs, what adds most, flagged regions, and what became of predictions."""

import json
from dataclasses import replace

import pytest

from auditor.records import NodeError, NonFinite, Verdict
from auditor.records.plan import INPUT
from auditor.report.blocks import Grid, Prose
from auditor.report.origins import cause, origins
from auditor.report.table import folds, measures, table
from tests.support.findings import finding
from tests.unit.report.factory import HOSTILE, make_audit, with_reasons


def tables(audit, words: str) -> list[Grid]:
    """Those that are shown: a table without rows is false."""
    return [block for block in origins(audit) if isinstance(block, Grid) and block and words in block.caption]


def said(audit) -> list[str]:
    return [text for block in origins(audit) if isinstance(block, Prose) for text in block.texts]


def test_the_same_birth_in_identical_blocks_is_told_once():
    audit = make_audit(60)
    refused = NodeError(unsupported="no kernel", cause="unsupported", originates_here=True)
    softmax = "aten.softmax.int"
    nodes = tuple(replace(r, errors={**r.errors, "fp16": refused}) if r.node.op == softmax else r for r in audit.nodes)
    blocks = sum(r.node.op == softmax for r in nodes)
    (one,) = (text for text in said(replace(audit, nodes=nodes)) if "softmax" in text)
    assert (
        one.startswith("softmax.int in `blocks.0.attn`")
        and f" and at {blocks - 1} similar operations raises an error on FP16 inputs: no kernel." in one
    )


def test_what_adds_most_comes_first_and_what_no_strategy_lowers_adds_nothing():
    audit = make_audit(8)
    _, bf16 = tables(audit, "add the most rounding error")
    shares = [float(row[2].strip("<>%")) for row in bf16.rows]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=5)  # 7 operations have a contribution, all are shown
    raised = tuple(replace(r, exposed={**r.exposed, "bf16": ()}) for r in audit.nodes)
    assert len(tables(replace(audit, nodes=raised), "add the most rounding error")) == 1


def test_the_share_of_an_operation_follows_from_the_effect_beside_it():
    """Also where the effect on rounded inputs, which a run measured, is much larger."""
    audit = make_audit(8)
    moved = {r.node.name: replace(r.contributions["bf16"], isolated=0.5) for r in audit.nodes if r.contributions}
    nodes = (replace(r, contributions={"bf16": moved[r.node.name]}) if r.contributions else r for r in audit.nodes)
    (table,) = tables(replace(audit, nodes=tuple(nodes), formats=("bf16",)), "Own rounding")
    own = [float(row[1].removesuffix(", predicted")) for row in table.rows]
    shares = [100 * x**2 / sum(x**2 for x in own) for x in own]
    assert [float(row[2].strip("<>%")) for row in table.rows] == pytest.approx(shares, abs=3)


@pytest.mark.parametrize(
    ("exposed", "remark"),
    [
        ((), " Without a plan, the operation runs in FP32."),
        (("cast",), " Under autocast, the operation runs in FP32."),
        (("autocast", "cast"), ""),
    ],
)
def test_a_birth_says_which_strategies_never_run_it(exposed: tuple[str, ...], remark: str):
    audit = make_audit(8)
    refused = NodeError(unsupported="no kernel", cause="unsupported", originates_here=True)
    row = replace(audit.nodes[2], errors={"fp16": refused}, exposed={"fp16": exposed})
    (one,) = (text for text in said(replace(audit, nodes=(row,))) if "no kernel" in text)
    assert one == f"linear in `blocks.0.attn.qkv` (`model.py:21`) raises an error on FP16 inputs: no kernel.{remark}"


def test_every_column_has_a_value_per_node():
    audit = make_audit(50)
    columns = table(audit)
    for key in ("name", "op", "owner", "source", "code", "shape", "max", "min", "flops", "histogram", "plan"):
        assert len(columns[key]) == 50, key
    for cells in columns["cells"].values():
        assert {len(cells[key]) for key in ("effect", "own", "local", "propagated", "reason", "verdict")} == {50}


def test_columns_are_strict_json_and_keep_names_as_they_are():
    columns = table(make_audit(20, hostile=True))
    again = json.loads(json.dumps(columns, allow_nan=False))
    assert f"embed.{HOSTILE}" in again["strings"]
    assert "inf" in again["cells"]["fp16"]["effect"]
    assert "nan" in again["cells"]["fp16"]["local"]


def test_identical_blocks_are_folded_and_an_odd_one_breaks_the_run():
    nodes = make_audit(5 + 14 * 6).nodes
    assert folds(nodes) == [[f"blocks.{i}" for i in range(6)]]
    odd = [
        replace(r, node=replace(r.node, op="aten.silu.default")) if r.node.owner == "blocks.2.mlp" else r for r in nodes
    ]
    assert folds(odd) == [["blocks.3", "blocks.4", "blocks.5"]]


def test_reads_point_back_at_the_nodes_that_are_read():
    audit = make_audit(20)
    reads = table(audit)["reads"]
    assert reads[0] == []
    for i, report in enumerate(audit.nodes):
        expected = [n for n in report.node.inputs if n != "tokens"]
        assert [audit.nodes[i - back].node.name for back in reads[i]] == expected


def test_every_measure_names_a_column_there_is():
    columns = table(make_audit(20))
    for measure in measures(("fp16", "bf16")):
        held = columns["cells"][measure["format"]] if "format" in measure else columns
        assert len(held[measure["column"]]) == 20
        assert measure["short"]


def test_inputs_and_outputs_of_the_model_point_at_what_reads_and_gives_them():
    audit = make_audit(20)
    columns = table(audit)
    assert columns["inputs"] == [{"name": "tokens", "shape": "int64[8, 128]", "into": [0]}]
    assert [audit.nodes[i].node.name for i in columns["outputs"]] == ["argmax"]
    twice = table(replace(audit, inputs=("int64[8, 128]",) * 2))
    assert twice["inputs"][0]["shape"] == ""


def test_what_is_computed_under_the_plan_is_read_computed_and_given():
    audit = with_reasons(make_audit(20))
    columns = table(audit)
    strings = columns["strings"]
    said = {columns["name"][i]: strings[columns["dtypes"][i]] for i in range(len(audit.nodes))}
    assert said["linear_2"] == "FP32|FP16|FP16"
    assert said["embedding_0"] == "FP32 int64|FP32|FP32"
    assert said["argmax"] == "FP16|FP16|int64"
    assert [strings[columns["plan"][i]] for i in (0, 2)] == ["FP32", "FP16"]
    reasons = [strings[columns["why"][i]] for i in range(len(audit.nodes))]
    assert reasons[:2] == [
        "it is handed FP32 by the parameter embed.weight",
        "autocast always runs layer_norm in FP32",
    ]


def test_a_verdict_of_safe_says_why_where_the_operation_alone_breaks_the_budget():
    """As where its author keeps it in FP32."""
    audit = make_audit(20)
    kept = Verdict("safe", "without a plan, no strategy runs the operation on low-precision values")
    row = audit.nodes[3]
    moved = replace(row.contributions["bf16"], isolated=2 * audit.max_error)
    row = replace(row, verdicts={**row.verdicts, "bf16": kept}, contributions={**row.contributions, "bf16": moved})
    columns = table(replace(audit, nodes=(*audit.nodes[:3], row, *audit.nodes[4:])))
    said = [columns["strings"][i] for i in columns["cells"]["bf16"]["reason"]]
    assert said[3] == kept.reason
    safe = [i for i, r in enumerate(audit.nodes) if r.verdicts["bf16"].verdict == "safe" and i != 3]
    assert {said[i] for i in safe} == {""}


def non_finite_of(begins: str, begins_op: str) -> NonFinite:
    where = ("sqrt", "norm", "aten.sqrt.default", "unet.py:28", "NaN")
    return NonFinite(*where, "cancellation", begins, "norm", begins_op, "unet.py:27")


@pytest.mark.parametrize(
    ("begins_op", "rules", "named"),
    [
        ("aten.sub.Tensor", {"sub": ["MSR001", "RED004"], "sqrt": ["SFT002"]}, "see RED004, SFT002."),
        ("aten.sub.Tensor", {"sub": ["MSR001"]}, "see MSR001."),
        ("aten.sub.Tensor", {"sub": ["RED004", "HWR001"]}, "see RED004."),
        ("aten.sub.Tensor", {"sub": ["HWR001"]}, "(unet.py:27)."),
        ("aten.sub.Tensor", {"mul": ["RED004"]}, "(unet.py:27)."),
        (INPUT, {"sub": ["INP001"], "sqrt": ["SFT002"]}, "see INP001."),
    ],
)
def test_the_cause_of_nan_names_the_rules_that_explain_it(
    begins_op: str, rules: dict[str, list[str]], named: str
) -> None:
    findings = [
        finding(rule, node, formats=("fp16",), measurable=rule != "HWR001")  # which is about speed
        for node, each in rules.items()
        for rule in each
    ]
    findings.append(finding("ACT003", "sub", formats=("bf16",)))
    audit = replace(make_audit(8), findings=tuple(findings))
    assert cause(audit, non_finite_of("sub", begins_op), "fp16").endswith(named)


def test_a_constant_that_does_not_fit_is_an_error_and_no_value_that_appears():
    audit = make_audit(20)
    said_of_it = "masked_fill has the constant -1e+09, outside the range of FP16 (±65504)"
    refused = NodeError(unsupported=said_of_it, cause="literal", originates_here=True)
    first, *others = audit.nodes
    first = replace(first, errors={**first.errors, "fp16": refused})
    texts = said(replace(audit, nodes=(first, *others)))
    assert any(f"raises an error on FP16 inputs: {said_of_it}." in text for text in texts)
    assert not any("Literal" in text for text in texts)
