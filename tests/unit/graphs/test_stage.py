"""Plans that are programs: verified in a fresh process, and what is said of them true of the files."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.document.live import read_plans
from auditor.errors import PlanError
from auditor.graphs import stage
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.metrics import output_error
from auditor.plan import verified
from auditor.plan.search import choose
from auditor.plan.verified import judge_answers
from auditor.records import Plan, Verification
from auditor.records.audit import Audit
from auditor.report.kept import explain_layer
from auditor.verify import run_patched
from tests.support.refusing import refused
from tests.unit.graphs.models import flat


def program(audit: Audit, name: str) -> nn.Module:
    plan = audit.plans[name]
    loaded: nn.Module = torch.export.load(io.BytesIO(audit.programs[plan.program.file])).module()
    return loaded


@pytest.mark.parametrize("name", ["graph_fp16", "graph_bf16"])
def test_a_verified_program_has_the_stated_error(audit: Audit, name: str) -> None:
    plan, batch = audit.plans[name], audit.live.batches[0]
    assert plan.is_verified
    (found,) = run_patched(program(audit, name), [batch], "cpu")
    with torch.no_grad():
        expected = tensor_outputs(flat()(batch[0][0]))
    assert plan.measured_error == pytest.approx(output_error(expected, found), rel=1e-6)
    assert 0 < plan.measured_error <= 0.01
    assert plan.low_precision_flops == 1.0


def test_what_is_said_of_the_program_is_true_of_it(audit: Audit) -> None:
    said, half = audit.plans["graph_fp16"].program, torch.float16
    found = program(audit, "graph_fp16")
    nodes = found.graph.nodes
    assert said.casts == sum(node.target is torch.ops.aten.to.dtype for node in nodes)
    assert said.operations == said.low + len(said.kept)
    assert {each.op: each.kind for each in said.kept}["aten.pow.Tensor_Scalar"] == "unsafe"
    assert {each.node for each in said.kept} <= {report.node.name for report in audit.nodes}
    assert {p.dtype for p in found.parameters()} == {half}
    assert said.fixed is None
    assert {x.shape[0] for x in found(torch.randn(9, 16)).values()} == {9}


@pytest.mark.slow
def test_a_program_beyond_the_budget_is_made_again_with_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Plan] = []
    targets: list[float] = []

    def harsh(bench: Any, plan: Plan, *others: Any) -> Plan:
        tried.append(judge_answers(bench, plan, *others))
        return tried[-1] if len(tried) > 1 else replace(tried[-1], verification=Verification(0.02))

    def seen(space: Any, target: float, runs: int) -> Any:
        targets.append(target)
        return choose(space, target, runs)

    monkeypatch.setattr(verified, "judge_answers", harsh)
    monkeypatch.setattr(stage, "choose", seen)
    torch.manual_seed(0)
    found = auditor.audit(flat(), torch.randn(4, 16), strategies="graph", formats="bf16", device="cpu")
    assert len(tried) == 2
    assert all(plan.is_verified for plan in tried)
    assert found.plans["graph_bf16"] == tried[-1]
    assert targets[1] <= 0.5 * targets[0]


class Sparse(nn.Module):
    """Exported, and in no way to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.edges = nn.Buffer(torch.eye(8).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.edges, self.layer(x))


class Chooses(nn.Module):
    """Python looks at a value: nothing that torch.export takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if y.sum() > -1e9 else -y


@pytest.mark.parametrize(
    ("model", "said"), [(Chooses, "cannot be exported as a graph"), (Sparse, "cannot be saved as a program")]
)
def test_what_cannot_be_exported_is_a_line_and_the_others_go_on(
    model: type[nn.Module], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = auditor.audit(model(), torch.randn(8, 16), strategies=("autocast", "graph"), formats="bf16", device="cpu")
    assert list(found.plans) == ["autocast_bf16"]
    assert found.plans["autocast_bf16"].is_verified
    (line,) = [text for text in found.warnings if "There is no plan of strategy graph" in text]
    assert said in line
    assert "\n" not in line
    assert "def forward" not in "".join(capfd.readouterr())


def test_what_takes_plans_knows_programs(audit: Audit, tmp_path: Path) -> None:
    audit.save(tmp_path)
    assert audit.recommended == "autocast_fp16"
    for plan in (audit, tmp_path, audit.to_dict()):
        with refused(PlanError, "plan-is-program", match=r"torch\.export\.load\('graph_fp16\.pt2'\)"):
            auditor.apply(flat(), plan, "graph_fp16")
        auditor.apply(flat(), plan, "autocast_fp16")
    _, plans, chosen = read_plans(tmp_path, None)
    assert (list(plans), chosen) == (["autocast_fp16", "autocast_bf16"], "autocast_fp16")
    text = (tmp_path / "patched_model.py").read_text(encoding="utf-8")
    assert "# graph_fp16: an exported program, torch.export.load('graph_fp16.pt2').module()" in text
    again = auditor.load(tmp_path)
    assert again.plans["graph_fp16"].program == audit.plans["graph_fp16"].program
    said = explain_layer(audit, "pow_1")
    assert "graph_fp16: FP32: unsafe: overflow" in said
    assert "pow_1 FP32: unsafe" in explain_layer(audit, "")
