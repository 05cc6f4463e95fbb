"""What a plan keeps in FP32: modules of one shape together, which they are, and why."""

import ast
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli.program import main
from auditor.errors import AuditorError
from auditor.records import Reason, ScopeChoice
from auditor.records.audit import Audit
from auditor.report.kept import explain_layer, islands, keep_alone
from auditor.report.plans import snippets
from auditor.report.reporters import text
from tests.support.refusing import refused
from tests.support.subjects import normal, seeded
from tests.unit.report.factory import HOSTILE, make_audit

SCATTERED = tuple(f"couplings.{i}.net.{j}" for i, j in itertools.product(range(5), (0, 2, 4)) if (i + j) % 3)


def keeping(*paths, rules=("BND002",)):
    """An audit whose recommended plan keeps these modules, for one reason."""
    audit = make_audit(60)
    plan = audit.plans["autocast_fp16"]
    scopes = {"": ScopeChoice("fp16"), **{path: ScopeChoice("fp32") for path in paths}}
    kept = replace(
        plan,
        scopes=scopes,
        reasons=(Reason("no-gain", "running it in low precision saves no time", paths, rules=rules),),
    )
    return replace(audit, plans={**audit.plans, "autocast_fp16": kept})


def test_the_clause_comes_before_the_rules():
    (found,) = islands(keeping("head").plans["autocast_fp16"])
    assert found.why == "running it in low precision saves no time (BND002)"
    for rules, why in ((("NRM001", "SFT001"), "NRM001, SFT001"), ((), "")):
        wordless = replace(
            make_audit(6).plans["autocast_fp16"], reasons=(Reason("budget", "", ("head",), rules=rules),)
        )
        assert [island.why for island in islands(wordless)] == [why]


def test_modules_of_one_shape_have_one_name():
    (found,) = islands(keeping(*SCATTERED).plans["autocast_fp16"])
    assert found.name == f"couplings.*.net.* x{len(SCATTERED)}"


def test_functions_of_the_root_stay_in_the_whole_model_and_a_terminal_names_all_of_them():
    functions = ("add", "linalg_inv", "matmul", "mean", "rsqrt")
    audit = make_audit(60)
    plan = audit.plans["autocast_fp16"]
    why = Reason("unsafe", "a reason " * 12, functions=tuple(f"..{name}" for name in functions))
    kept = replace(plan, scopes={"": ScopeChoice("fp16", keep=functions)}, reasons=(why,))
    (found,) = islands(kept)
    assert found.name == f"{', '.join(functions)} in the whole model"
    audit = replace(audit, plans={**audit.plans, "autocast_fp16": kept}, findings=())
    said = text(audit, width=80, color=False)
    assert found.name in " ".join(said.split())


# What `--explain-layer` says: of a fresh audit, and of its files the same.


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return 400 * self.inner(x) * torch.rsqrt((x * 400).pow(2).mean(-1, keepdim=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), Norm(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x * 10))).softmax(-1)


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(seeded(Net), normal(4, 16), formats=("fp16",), device="cpu")


def test_a_module_that_stays_fp32_says_why_under_each_plan(audit: Audit) -> None:
    text = explain_layer(audit, "norm")
    for name, plan in audit.plans.items():
        words = ["FP32: " + reason.words for reason in plan.reasons if "norm" in reason.modules] or ["FP16"]
        mark = " (recommended)" if name == audit.recommended else ""
        assert [f"  {name}{mark}: {clause}" for clause in words] == [
            line for line in text.splitlines() if line.startswith(f"  {name}")
        ]
    assert "FP32: pow_1 is unsafe: overflow: " in text
    assert text.splitlines()[1].startswith(f"  {audit.recommended} (recommended)")


def test_an_operation_says_why_too(audit: Audit) -> None:
    (softmax,) = (r.node.name for r in audit.nodes if "softmax" in r.node.op)
    text = explain_layer(audit, softmax)
    assert "  autocast_fp16: not in low precision: autocast runs softmax in FP32 by itself" in text.replace(
        " (recommended)", ""
    )
    inside = next(r.node.name for r in audit.nodes if r.node.owner == "norm")
    assert "FP32, like all of norm: " in explain_layer(audit, inside)


def test_a_name_that_there_is_not(audit: Audit) -> None:
    with refused(AuditorError, "no-such-layer", match=r"did you mean norm\?"):
        explain_layer(audit, "nrm")


@pytest.mark.parametrize("given", ["", "plan.json"])
def test_the_files_of_an_audit_say_the_same(
    audit: Audit, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.save(tmp_path)
    assert main(["explain-layer", str(tmp_path / given), "norm"]) == 0
    assert capsys.readouterr().out.strip() == explain_layer(audit, "norm").strip()
    assert main(["explain-layer", str(tmp_path / given), "nrm"]) == 2


# Code of the report to copy: run as pasted, for the strategy that is recommended.


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_the_code_keeps_one_module_in_fp32(strategy: str) -> None:
    code = keep_alone(make_audit(recommended=f"{strategy}_bf16"), "1")
    assert code is not None
    torch.manual_seed(0)
    names = {"model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))}
    exec(code, names)
    seen: list[torch.dtype] = []
    for module in names["model"]:
        module.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    names["model"](torch.randn(4, 8))
    handed_on = torch.float32 if strategy == "autocast" else torch.bfloat16
    assert seen[0] == seen[2] == torch.bfloat16
    assert seen[1] in (torch.float32, handed_on)
    stored = torch.bfloat16 if strategy == "cast" else torch.float32
    assert [layer.weight.dtype for layer in names["model"]] == [stored, torch.float32, stored]


def test_the_root_and_no_plan_have_none() -> None:
    assert keep_alone(make_audit(), "") is None
    assert keep_alone(make_audit(recommended=None), "1") is None
    assert snippets(make_audit(recommended=None)) == ()


def test_snippets_are_python_whatever_the_names() -> None:
    kept = (keep_alone(make_audit(recommended=name), HOSTILE) for name in ("autocast_fp16", "cast_fp16"))
    for code in [*kept, *(s.text for s in snippets(make_audit()))]:
        ast.parse(code or "")
