"""Every path that the calibration batches take is judged, and what cannot be recorded is said."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import Audit, cli
from auditor.reporters import html, markdown, text
from tests.files.test_strangers import run
from tests.support.replaying import Model, linear
from tests.support.subjects import normal

TWO_BATCHES = """
import torch
from torch import nn


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, past=None):
        k = self.a(x)
        if past is not None:
            k = torch.cat([past, k], 1)
        return self.b(k), k


def get_model():
    torch.manual_seed(0)
    return M()


def get_inputs():
    torch.manual_seed(1)
    return [(torch.randn(2, 4, 8),), (torch.randn(2, 1, 8), 1e6 * torch.randn(2, 4, 8))]
"""

CAT = TWO_BATCHES[: TWO_BATCHES.index("torch.cat")].count("\n") + 1


def unrecordable(m: Any, x: Tensor, write: bool = False) -> Tensor:
    """A branch in which NumPy writes into a tensor."""
    y = m.first(x)
    if write:
        y = y.detach() * 2
        y.numpy()[:, 0] = 7
        return y + 1
    return y


def one_layer(m: Any, x: Tensor) -> Tensor:
    return m.first(x)


def one_more(m: Any, x: Tensor, more: bool = False) -> dict[str, Tensor]:
    """Returns another output, ahead of the usual one, where it is asked for it; low, it breaks FP16."""
    y = m.first(x)
    return {"scaled": y * 1e6, "y": y} if more else {"y": y}


def audit_of(forward: Callable[..., Any], *batches: Any, **options: Any) -> Audit:
    """Of a function over a layer of its own."""
    return auditor.audit(Model(forward, first=linear(8, 8)).eval(), list(batches), device="cpu", **options)


def verdicts(audit: Audit, fmt: str = "fp16") -> dict[str, str]:
    return {report.node.name: report.verdicts[fmt].verdict for report in audit.nodes}


def everything_said(audit: Audit, folder: Path) -> str:
    files = {file.name: file.read_text() for file in audit.save(folder) if file.suffix in (".html", ".json")}
    return "\n".join([text(audit, width=80, color=False), markdown(audit), *files.values()])


@pytest.fixture(scope="module")
def two_batches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the command was run in, and what it said on the terminal."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "two_batches.py").write_text(TWO_BATCHES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code, said, errors = run("two_batches.py", "--device", "cpu", "--fail-on", "never")
    assert code == 0, errors
    return folder, " ".join(said.split())


def test_an_overflow_on_the_second_batchs_branch_is_named_with_line_and_batch(two_batches: tuple[Path, str]) -> None:
    said = two_batches[1]
    assert f"two_batches.py:{CAT}" in said  # the line that reads the input, which does not fit FP16
    page = markdown(auditor.load(two_batches[0] / "audits" / "two_batches"))
    assert "FP16: 2 unsafe and 0 sensitive of 3 operations" in page and "BF16: 0 unsafe" in page
    assert f"values turn NaN at linear in b (two_batches.py:{CAT + 1}), in batch 2" in said
    assert "The cause is overflow of the input `past`; see INP001" in said
    measured = [one.message for one in auditor.load(two_batches[0] / "audits" / "two_batches").findings]
    assert any(re.search(r"cat is unsafe in FP16, since .* overflows .*\(batch 2\)", said) for said in measured)


def test_no_reporter_says_that_nothing_is_unsafe(two_batches: tuple[Path, str]) -> None:
    audit = auditor.load(two_batches[0] / "audits" / "two_batches")
    assert verdicts(audit)["cat"] == "unsafe" and verdicts(audit, "bf16")["cat"] == "safe"
    cat = next(report for report in audit.nodes if report.node.name == "cat")
    assert cat.node.batch == cat.verdicts["fp16"].batch == 2
    said = everything_said(audit, two_batches[0] / "again")
    assert "batch 2" in said and "none of the 3 operations is unsafe" not in said
    assert not re.search(r"_batch\d", said)


def test_the_plan_holds_on_both_batches(two_batches: tuple[Path, str]) -> None:
    plan = json.loads((two_batches[0] / "audits" / "two_batches" / "plan.json").read_text())
    recommended = plan["plans"][plan["recommended"]]
    assert recommended["verification"]["holds"] and recommended["format"] == "bf16"
    # autocast computes cat in FP32, since one of its inputs is
    for name, op, module in (("autocast_fp16", "linear_1", "b"), ("cast_fp16", "cat", "")):
        fp16 = plan["plans"][name]
        assert fp16["verification"]["holds"] and fp16["predicted_error"] < 0.01
        assert any(f"{op} is unsafe" in reason["words"] and module in reason["modules"] for reason in fp16["reasons"])


def test_a_dry_run_lists_each_distinct_batch(two_batches: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(two_batches[0] / "two_batches.py"), "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 batch of float32[2, 4, 8]; 1 batch of float32[2, 1, 8], float32[2, 4, 8]" in said


def test_a_batch_that_cannot_be_recorded_is_said_to_be_unjudged() -> None:
    audit = audit_of(unrecordable, (normal(4, 8),), (normal(4, 8, seed=1), True), formats=("bf16",))
    (said,) = (warning for warning in audit.warnings if "which was not audited" in warning)
    assert said.startswith("Batch 2 takes another path, which was not audited: ")
    assert not said.endswith("?.")
    assert len(audit.nodes) == 1


def test_batches_whose_training_step_was_not_measured_are_said() -> None:
    def mean(y: Tensor) -> Tensor:
        return y.mean()

    given = {"mode": "training", "loss_fn": mean, "formats": ("bf16",), "quick": True}
    audit = audit_of(one_layer, (normal(4, 8),), (normal(6, 8),), (normal(4, 8, seed=1),), **given)
    (said,) = (warning for warning in audit.warnings if "Gradients" in warning)
    assert said.startswith("Gradients were measured on 2 of 3 batches, since ")
    alike = audit_of(one_layer, (normal(4, 8),), (normal(4, 8, seed=1),), **given)
    assert not any("Gradients" in warning for warning in alike.warnings)


@pytest.mark.parametrize("first", [False, True])
def test_criteria_go_by_the_names_of_what_each_path_returns(first: bool) -> None:
    batches = [(normal(4, 8), first), (normal(4, 8, seed=1), not first)]
    audit = audit_of(one_more, *batches, formats=("fp16",), criteria=["y: max_abs <= 1"])
    assert verdicts(audit) == {"linear": "safe", "mul": "unsafe"}
    (mul,) = (report for report in audit.nodes if report.node.name == "mul")
    assert mul.verdicts["fp16"].batch == (1 if first else 2)
    assert any(plan.is_verified for plan in audit.plans.values())


# Models that return what they compute in FP32 inside a module that is low, and models whose sizes depend on values.


def cached_attention(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns its rotated key beside the answer, as decoders do that keep a cache; the angles are FP32."""
    position = torch.arange(x.shape[1]).float()[:, None]
    k = m.k(x) * position.cos()
    y = (m.q(x) @ k.transpose(-1, -2)).softmax(-1).to(x.dtype) @ m.v(x)
    return m.o(y), k


def test_what_a_low_module_returns_in_fp32_is_planned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Model(cached_attention, **{name: nn.Linear(8, 8) for name in "qkvo"}))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    found = auditor.audit(model, (torch.randn(2, 4, 8),), formats="fp16", progress=False)
    for plan in found.plans.values():
        assert plan.is_verified, plan.verification
        assert 0.3 * plan.measured_error < plan.predicted_error < 3 * plan.measured_error


def pooled_graph(m: Any, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Convolves a graph, squares its adjacency as a sparse matrix, and keeps the nodes with the highest scores.

    What the sparse matrix is made from nobody else reads: it is the matrix's memory.
    """
    nodes = x.shape[0]
    weights = torch.zeros(edges.shape[1]).index_add(0, torch.arange(edges.shape[1]), x.new_ones(edges.shape[1]))
    starts = torch._convert_indices_from_coo_to_csr(edges[0], nodes)
    adjacency = torch.sparse_csr_tensor(starts, edges[1], weights.float(), (nodes, nodes))
    squared = (adjacency @ adjacency).to_sparse_coo()
    x = x.new_zeros(nodes, 8).index_add(0, edges[0], m.first(x)[edges[1]])
    score = m.score(x.relu()).tanh().squeeze(1)
    kept = score.topk(nodes // 2).indices
    place = kept.new_full((nodes,), -1)
    place[kept] = torch.arange(nodes // 2)
    row, column = place[squared.indices()[0]], place[squared.indices()[1]]
    both = (row >= 0) & (column >= 0)
    messages = (x[kept] * score[kept, None])[column[both]] * squared.values()[both, None]
    pooled = messages.new_zeros(nodes // 2, 8).index_add(0, row[both], messages)
    return m.last(pooled.relu())


def test_the_memory_of_a_sparse_matrix_stays_while_it_is_measured() -> None:
    layers = {"first": linear(6, 8), "score": linear(8, 1), "last": linear(8, 4)}
    model, ring = Model(pooled_graph, **layers), sum(torch.eye(20).roll(shift, 1) for shift in (1, 2, 3))
    found = auditor.audit(model, (normal(20, 6), ring.nonzero().T.contiguous()), progress=False)
    values = next(report for report in found.nodes if report.node.op == "aten.values.default")
    assert values.range.max_abs == 3  # from i to i + 4 in two steps: 1 + 3, 2 + 2, 3 + 1
    assert all(plan.is_verified for plan in found.plans.values())


def test_indices_changed_by_the_audit_never_make_a_matrix_that_reads_beyond_its_memory() -> None:
    made = list[torch.Tensor]()

    def convolve(m: Any, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        starts = torch._convert_indices_from_coo_to_csr(edges[0], len(x))
        matrix = torch.sparse_csr_tensor(starts, edges[1], torch.ones(edges.shape[1]), (len(x), len(x)))
        made.append(edges)  # the next line would read what does not belong to the matrix
        return m.layer(matrix @ x)

    edges = sum(torch.eye(20).roll(shift, 1) for shift in (1, 2, 3)).nonzero().T.contiguous()
    model = Model(convolve, layer=linear(6, 4))
    auditor.audit(model, (normal(20, 6), edges), formats=("bf16",), progress=False)
    assert made and all(torch.equal(seen, edges) for seen in made)


# Plans that run nothing low do not claim an error of 0: every reporter says what the smallest reachable error is.


BUDGET = 1e-5


@pytest.fixture(scope="module")
def audit():
    torch.manual_seed(0)
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return auditor.audit(nn.Sequential(*layers).eval(), normal(16, 64), formats=("fp16",), max_error=BUDGET)


@pytest.fixture(scope="module")
def reach(audit):
    return min(plan.reach for plan in audit.plans.values())


def test_the_smallest_error_is_over_the_budget_and_below_that_of_everything_low(audit, reach):
    assert audit.recommended is None
    everything = min(base.measured_error for base in audit.baselines.values())
    assert BUDGET < reach < everything


def test_reports_say_so_and_claim_no_error_of_zero(audit, reach):
    page = re.sub(r"\s+", " ", html(audit))
    said = f"the smallest reachable error is {reach:.2g}, in FP16"
    assert all(said in re.sub(r"\s+", " ", shown) for shown in (text(audit, width=100), markdown(audit), page))
    rows = [line for line in text(audit, width=100, color=False).splitlines() if "FP16 " in line and "all FP32" in line]
    assert len(rows) == len(audit.plans)
    assert not [row for row in rows if re.search(r" 0 |1\.00x", row)]
    assert page.count("Smallest reachable error") == len(audit.plans)
    assert "Measured error" not in page
    assert "1.00×" not in page
