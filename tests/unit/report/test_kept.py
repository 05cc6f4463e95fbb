"""What a plan keeps in FP32: modules of one shape together, which they are, and why."""

import ast
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli import main
from auditor.errors import AuditorError
from auditor.records import Dtypes, NodeReport, Reason, ScopeChoice
from auditor.records.audit import Audit
from auditor.report.kept import computed_in, dtype_label, explain_layer, islands, keep_alone, tally, why_raised
from auditor.report.plans import snippets
from auditor.reporters import text
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded
from tests.unit.report.factory import HOSTILE, make_audit

SCATTERED = tuple(f"couplings.{i}.net.{j}" for i, j in itertools.product(range(5), (0, 2, 4)) if (i + j) % 3)


def keeping(*paths, rules=("BND004",)):
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
    assert found == "head: running it in low precision saves no time (BND004)"
    for rules, line in ((("NRM001", "SFT001"), "head: NRM001, SFT001"), ((), "head")):
        wordless = replace(
            make_audit(6).plans["autocast_fp16"], reasons=(Reason("budget", "", ("head",), rules=rules),)
        )
        assert islands(wordless) == (line,)


def test_modules_of_one_shape_have_one_name():
    (found,) = islands(keeping(*SCATTERED).plans["autocast_fp16"])
    assert found.startswith(f"couplings.*.net.* x{len(SCATTERED)}: ")


def test_functions_of_the_root_stay_in_the_whole_model_and_a_terminal_names_all_of_them():
    functions = ("add", "linalg_inv", "matmul", "mean", "rsqrt")
    audit = make_audit(60)
    plan = audit.plans["autocast_fp16"]
    why = Reason("unsafe", "a reason " * 12, functions=tuple(f"..{name}" for name in functions))
    kept = replace(plan, scopes={"": ScopeChoice("fp16", keep=functions)}, reasons=(why,))
    (found,) = islands(kept)
    name = f"{', '.join(functions)} in the whole model"
    assert found.startswith(f"{name}: a reason ")
    audit = replace(audit, plans={**audit.plans, "autocast_fp16": kept}, findings=())
    said = text(audit, width=80, color=False)
    assert name in " ".join(said.split())


# What `--explain-layer` says: of a fresh audit, and of its files the same.


def normed(m: Any, x: Tensor) -> Tensor:
    return 400 * m.inner(x) * torch.rsqrt((x * 400).pow(2).mean(-1, keepdim=True))


def net() -> nn.Module:
    parts = {"first": nn.Linear(16, 16), "norm": Model(normed, inner=nn.Linear(16, 16)), "last": nn.Linear(16, 4)}
    return Model(lambda m, x: m.last(m.norm(m.first(x * 10))).softmax(-1), **parts)


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(seeded(net), normal(4, 16), formats=("fp16",), device="cpu")


def test_a_module_that_stays_fp32_says_why_under_each_plan(audit: Audit) -> None:
    text = explain_layer(audit, "norm")
    for name, plan in audit.plans.items():
        words = ["FP32; " + reason.words for reason in plan.reasons if "norm" in reason.modules] or ["FP16"]
        mark = " (recommended)" if name == audit.recommended else ""
        expected = [line for line in text.splitlines() if line.startswith(f"  {name}")]
        assert [f"  {name}{mark}: {clause}" for clause in words] == expected
    assert "FP32; pow_1 is unsafe, since " in text
    assert text.splitlines()[1].startswith(f"  {audit.recommended} (recommended)")


def test_an_operation_says_why_too(audit: Audit) -> None:
    (softmax,) = (r.node.name for r in audit.nodes if "softmax" in r.node.op)
    text = explain_layer(audit, softmax)
    assert "  autocast_fp16: not in low precision; autocast always runs softmax in FP32" in text.replace(
        " (recommended)", ""
    )
    inside = next(r.node.name for r in audit.nodes if r.node.owner == "norm")
    assert "FP32, like all of norm; " in explain_layer(audit, inside)


def test_a_name_that_there_is_not(audit: Audit) -> None:
    with refused(AuditorError, "no-such-layer", match=r"did you mean norm\?"):
        explain_layer(audit, "nrm")


@pytest.mark.parametrize("given", ["", "plan.json"])
def test_its_files_say_the_same(audit: Audit, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit.save(tmp_path)
    assert main(["explain-layer", str(tmp_path / given), "norm"]) == 0
    assert capsys.readouterr().out.strip() == explain_layer(audit, "norm").strip()
    assert main(["explain-layer", str(tmp_path / given), "nrm"]) == 2


# Code of the report to copy: run as pasted, for the strategy that is recommended.


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_the_code_keeps_one_module_in_fp32(strategy: str) -> None:
    code = keep_alone(make_audit(recommended=f"{strategy}_bf16"), "1")
    names = {"model": seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))}
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


# What operations compute in, and why that is FP32: every sentence on a model on which it is true, seen in a run of its
# own.


def every_reason(m: Any, x: Tensor) -> Tensor:
    """An operation for each reason there is."""
    scaled = x * 2
    low = m.first(scaled)
    single = m.norm(low)
    both = single * low
    asked = low.float()
    with torch.autocast("cuda", enabled=False):
        off = m.second(asked)
    ramp = torch.arange(64, dtype=torch.float32)
    return m.kept(m.last(both + off / 100 + ramp / 1000))


REASONS = {
    "the module is in FP32, since add_2 is unsafe": {"add", "sub"},
    "autocast always runs layer_norm in FP32": {"layer_norm"},
    "the model's code requests FP32": {"to", "arange"},
    "the model's code switches autocast off there": {"linear"},
    "reads FP32 from": {"mul", "div", "add"},
}


@pytest.fixture(scope="module")
def mixed() -> Audit:
    def make() -> nn.Module:
        layers = {"first": nn.Linear(16, 64), "norm": nn.LayerNorm(64), "second": nn.Linear(64, 64)}
        kept = Function(lambda x: (x + 3000.0) - 3000.0)  # amplifies rounding, so it stays in FP32
        return Model(every_reason, **layers, kept=kept, last=nn.Linear(64, 1024))

    return auditor.audit(seeded(make), normal(256, 16), formats=("fp16",), strategies=("autocast",), device="cpu")


def reasons(mixed: Audit) -> dict[str, list[NodeReport]]:
    plan, found = mixed.plans[mixed.recommended or ""], dict[str, list[NodeReport]]()
    for report in mixed.nodes:
        found.setdefault(why_raised(plan)(report), []).append(report)
    return found


def test_each_reason_is_given_where_it_is_true(mixed: Audit) -> None:
    assert mixed.recommended == "autocast_fp16"
    assert mixed.plans["autocast_fp16"].scopes["kept"].precision == "fp32"
    found = reasons(mixed)
    for start, ops in REASONS.items():
        assert {r.node.op.split(".")[1] for why, rows in found.items() if why.startswith(start) for r in rows} == ops
    assert all(not why or why.startswith(tuple(REASONS)) for why in found)
    assert {computed_in(r) for r in found[""]} == {"fp16"}
    assert {computed_in(r) for why, reports in found.items() if why for r in reports} == {"fp32"}


def test_a_batch_norm_with_fp32_statistics_reads_both() -> None:
    def batch_normed() -> nn.Module:
        parts = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "out": nn.Linear(8, 4)}
        return Model(lambda m, x: m.out(m.norm(m.conv(x)).mean((2, 3))), **parts)

    found = auditor.audit(seeded(batch_normed), normal(4, 3, 8, 8), formats="fp16", strategies="autocast", device="cpu")
    given = {r.node.op.split(".")[1]: (why, r.planned) for why, rs in reasons(found).items() for r in rs}
    assert given["batch_norm"] == (
        "the inputs are FP16 and FP32, so torch computes in FP32, the wider format",
        Dtypes(("float16", "float32"), "float32", "float16"),
    )
    assert {why for op, (why, _) in given.items() if op != "batch_norm"} == {""}


def test_labels_and_tallies(mixed: Audit) -> None:
    assert [dtype_label(d) for d in ("float16", "bfloat16", "float32", "float64", "int64", "bool", "float8_e4m3fn")] == [
        "FP16", "BF16", "FP32", "FP64", "int64", "bool", "float8_e4m3fn",
    ]  # fmt: skip
    one = mixed.nodes[0]
    low, high = (replace(one, planned=Dtypes((), name, name)) for name in ("float16", "float32"))
    assert tally([low, low]) == "FP16"
    assert tally([low, high, low]) == "FP16 (2 operations) and FP32 (1 operation)"
    assert tally([replace(one, planned=None)]) == ""
    assert computed_in(replace(one, planned=Dtypes((), "int64", "int64"))) is None
