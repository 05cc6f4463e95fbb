import json
from dataclasses import replace

from auditor.report.table import TEXT_BUDGET, folds, measures, table
from tests.unit.report.factory import HOSTILE, make_audit


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


def test_verdicts_are_digits():
    audit = make_audit(30)
    columns = table(audit)
    for i, report in enumerate(audit.nodes):
        assert columns["verdicts"][int(columns["cells"]["fp16"]["verdict"][i])] == report.verdicts["fp16"].verdict


def test_identical_blocks_are_folded_and_an_odd_one_breaks_the_run():
    nodes = make_audit(5 + 14 * 6).nodes
    assert folds(nodes) == [[f"blocks.{i}" for i in range(6)]]
    odd = [
        replace(r, node=replace(r.node, op="aten.silu.default")) if r.node.owner == "blocks.2.mlp" else r for r in nodes
    ]
    assert folds(odd) == [["blocks.3", "blocks.4", "blocks.5"]]


def test_long_prose_stops_at_its_budget():
    audit = make_audit(3000)
    nodes = tuple(replace(r, node=replace(r.node, code=f"line {i} " + "x" * 300)) for i, r in enumerate(audit.nodes))
    columns = table(replace(audit, nodes=nodes))
    assert columns["leftOut"] > 0
    assert sum(len(s) for s in columns["strings"] if s.startswith("line")) <= TEXT_BUDGET


def test_reads_point_back_at_the_nodes_that_are_read():
    audit = make_audit(20)
    reads = table(audit)["reads"]
    assert reads[0] == []
    for i, report in enumerate(audit.nodes):
        assert [audit.nodes[i - back].node.name for back in reads[i]] == list(report.node.inputs)


def test_every_measure_names_a_column_there_is():
    columns = table(make_audit(20))
    for measure in measures(("fp16", "bf16")):
        held = columns["cells"][measure["format"]] if "format" in measure else columns
        assert len(held[measure["column"]]) == 20
        assert measure["short"]
