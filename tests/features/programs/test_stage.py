"""Plans that are programs: verified in a fresh process, and what is said of them true of the files."""

import io
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import auditor
from auditor.document.live import read_plans
from auditor.errors import PlanError
from auditor.facade import contents
from auditor.features.programs import graphs as stage
from auditor.features.programs.exported import export_model, save_program
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.metrics import output_error
from auditor.numerics.nodes import mutates
from auditor.plan import verified
from auditor.plan.search import choose
from auditor.plan.verified import judge_answers
from auditor.records import Plan, Verification
from auditor.records.audit import Audit
from auditor.report.kept import explain_layer
from auditor.verify.loaders import ProgramModule
from auditor.verify.running import run_patched
from tests.features.programs.conftest import close_answers, flat
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.support.replaying import Model


def program(audit: Audit, name: str) -> nn.Module:
    plan = audit.plans[name]
    return torch.export.load(io.BytesIO(audit.programs[plan.program.file])).module()


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


def test_the_users_score_is_what_a_run_of_the_file_by_hand_gives(audit: Audit) -> None:
    for name, passed in (("graph_fp16", True), ("graph_bf16", False)):
        plan = audit.plans[name]
        with auditor.emulate("cuda"):
            values = [float(x) for batch in close_answers(ProgramModule(program(audit, name))) for x in batch]
        assert plan.score.failure is None
        assert (plan.score.value, plan.score.passed, plan.holds) == (statistics.fmean(values), passed, passed)


@pytest.mark.slow
def test_a_program_beyond_the_budget_is_made_again_with_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Plan] = []
    targets: list[float] = []

    def harsh(planning: Any, plan: Plan, *others: Any) -> Plan:
        tried.append(judge_answers(planning, plan, *others))
        return tried[-1] if len(tried) > 1 else replace(tried[-1], verification=Verification(0.02))

    def seen(space: Any, target: float) -> Any:
        targets.append(target)
        return choose(space, target)

    monkeypatch.setattr(verified, "judge_answers", harsh)
    monkeypatch.setattr(stage, "choose", seen)
    found = auditor.audit(flat(), torch.randn(4, 16), strategies="graph", formats="bf16", device="cpu")
    assert len(tried) == 2
    assert all(plan.is_verified for plan in tried)
    assert contents(found.plans["graph_bf16"]) == contents(tried[-1])
    assert targets[1] <= 0.5 * targets[0]


def chooses(m: Any, x: Tensor) -> Tensor:
    """Python looks at a value: nothing that torch.export takes."""
    y = m.layer(x)
    return y if y.sum() > -1e9 else -y


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (chooses, "cannot be exported as a graph"),
        (lambda m, x: torch.sparse.mm(m.edges, m.layer(x)), "cannot be saved as a program"),
    ],
)
def test_what_cannot_be_exported_costs_one_line(forward: Any, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = Model(forward, layer=nn.Linear(16, 16), edges=torch.eye(8).to_sparse())
    found = auditor.audit(model, torch.randn(8, 16), strategies=("autocast", "graph"), formats="bf16", device="cpu")
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
    assert re.search(r"graph_fp16: FP32; unsafe, since \S+ overflows", said)
    assert "pow_1: FP32; unsafe" in explain_layer(audit, "")


# Exporting: the graph answers as the model does, for batches of any size where the model allows it.


def written() -> nn.Module:
    """Writes in place, norms by statistics, drops out, casts to what is there."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.relu_(m.norm(m.conv(x)))
        y[:, 0] = 2 * y[:, 0]
        return m.drop(y).to(x.dtype)

    return Model(forward, conv=nn.Conv1d(4, 4, 3), norm=nn.BatchNorm1d(4), drop=nn.Dropout())


@dataclass
class Pair:
    left: Tensor
    right: Tensor


class Classed(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Pair:
        return Pair(x.exp(), x.sin() * scale)


@pytest.mark.parametrize("made", [written, flat])
@pytest.mark.parametrize("size", [1, 3])
def test_the_graph_answers_as_the_model_for_any_size(made: Callable[[], nn.Module], size: int) -> None:
    torch.manual_seed(0)
    model, shape = made().eval(), (4, 16)
    trailing = shape if made is written else shape[1:]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = export_model(model, ((torch.randn(size, *trailing),), {}))
    assert found.fixed == ""
    for other in (1, 2, 5):
        x = torch.randn(other, *trailing)
        with torch.no_grad():
            ours, theirs = tree_leaves(found.graph_module(x)), tree_leaves(model(x.clone()))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_nothing_is_written_in_place_and_no_cast_changes_nothing() -> None:
    nodes = export_model(written().eval(), ((torch.randn(2, 4, 16),), {})).graph_module.graph.nodes
    called = [node for node in nodes if node.op == "call_function"]
    assert not any(mutates(node.target) for node in called)
    names = {str(node.target) for node in called}
    assert "aten.batch_norm.default" in names
    assert not names & {"aten.to.dtype", "aten.dropout.default"}


def attention(x: Tensor) -> Tensor:
    """Its reshape can be a `view` only where the kernel returns the strides of the queries; kernels for gradients do not."""
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    distance = torch.arange(3.0)[:, None] - torch.arange(3.0)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=distance.expand(x.shape[0], 2, 3, 3))
    return mixed.transpose(1, 2).reshape(x.shape[0], 3, 8)


def test_a_program_runs_with_kernels_that_return_other_strides() -> None:
    x = torch.randn(2, 3, 8)
    exported = export_model(Function(attention), ((x,), {}))
    saved = save_program(exported.graph_module, exported)
    program = torch.export.load(io.BytesIO(saved.content))
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            graph, loaded, expected = (run(x) for run in (exported.graph_module, program.module(), attention))
        torch.testing.assert_close(graph, expected)
        torch.testing.assert_close(loaded, expected)


def test_a_size_that_the_model_fixes_is_said() -> None:
    model, x = Function(lambda x: x.softmax(1) * torch.arange(4.0)[:, None]), torch.randn(4, 6)
    found = export_model(model, ((x,), {}))
    assert found.fixed
    torch.testing.assert_close(found.graph_module(x), model(x))


def test_inputs_of_several_sizes_keep_them() -> None:
    found = export_model(Function(lambda x, y: x.sum() + y), ((torch.randn(2), torch.randn(3)), {}))
    assert found.fixed == "the inputs do not share a first dimension"


class Named(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, scale: float = 1.0, **others: Tensor) -> Tensor:
        return x * others["by"] * scale + sum(rest)


def test_sizes_are_open_whatever_the_arguments_are_called() -> None:
    found = export_model(Named(), ((torch.randn(3, 4), torch.randn(3, 4)), {"by": torch.randn(3, 4), "scale": 2.0}))
    assert found.fixed == ""
    x = torch.randn(5, 4)
    torch.testing.assert_close(found.graph_module(x, x, by=x, scale=2.0), 2 * x * x + x)


def test_what_takes_nothing_is_said_to() -> None:
    assert export_model(Function(lambda: torch.ones(3).exp()), ((), {})).fixed == "the model takes no tensors"


def test_classes_of_the_users_own_become_names() -> None:
    x = torch.randn(3, 4)
    found = export_model(Classed(), ((x,), {"scale": 2.0})).graph_module(x, scale=2.0)
    assert list(found) == ["left", "right"]
    torch.testing.assert_close(found["right"], 2 * x.sin())
