"""Which plan a tool is given, what it is told of it, and that names from a model stay names."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import auditor
from auditor import cli
from auditor.artefact.applying import apply_plan
from auditor.document.read import audit_in
from auditor.errors import AuditorError
from auditor.records.audit import Audit
from auditor.snippets import TOOLS, snippet, snippets
from auditor.snippets.storage import patterns
from tests.support.patching import Net, plan, scope
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.small_models import tied
from tests.support.snippets import document, pasted
from tests.support.subjects import DTYPES, normal, seeded
from tests.unit.report.factory import make_audit

LOW = {"": scope("fp16"), "norm": scope("fp32")}
BOTH = {"autocast_fp16": LOW, "cast_fp16": LOW}


def words(text: str) -> str:
    """Comments as running text."""
    return " ".join(text.replace("\n# ", " ").split())


def test_the_recommended_plan_where_the_tool_can_follow_it() -> None:
    found = snippets(document(BOTH, "autocast_fp16"))
    assert list(found) == ["hf", "fsdp2", "lightning", "gradscaler"]
    assert list(TOOLS) == [*found, "diffusers"]
    for tool, text in found.items():
        name = "cast_fp16" if tool == "hf" else "autocast_fp16"
        assert f"the plan '{name}'. Verified: the patched model has an error of 0.004, budget 0.01" in words(text)
    assert "The recommended plan, 'autocast_fp16', has no equivalent in this tool." in words(found["hf"])


def test_a_plan_that_does_not_hold_is_no_stand_in_and_says_so_when_named() -> None:
    content = document(BOTH, "autocast_fp16")
    content["plans"]["cast_fp16"]["verification"] = {"measured_error": 0.2}
    unnamed = snippet(content, "hf")
    assert all(line.startswith("#") for line in unnamed.splitlines())
    assert "no plan of strategy cast meets the error budget" in words(unnamed)
    assert "NOT within the budget: the patched model has an error of 0.2, budget 0.01" in words(
        snippet(content, "hf", "cast_fp16")
    )
    content["plans"]["cast_fp16"]["verification"]["measured_error"] = None
    assert "The plan failed in a run" in words(snippet(content, "hf", "cast_fp16"))


@pytest.mark.parametrize(
    ("tool", "plan", "said"),
    [
        (
            "hf",
            "autocast_fp16",
            "cannot express 'autocast_fp16', a plan of strategy autocast. For an autocast plan, load the checkpoint",
        ),
        ("gradscaler", "cast_fp16", "GradScaler refuses FP16 gradients ('Attempting to unscale FP16 gradients.')"),
    ],
)
def test_a_plan_that_a_tool_cannot_follow_is_a_comment(tool: str, plan: str, said: str) -> None:
    text = snippet(document(BOTH, "autocast_fp16"), tool, plan)
    assert all(line.startswith("#") for line in text.splitlines())
    assert said in words(text)


def test_plans_that_torch_cannot_run_are_not_said_to_break_the_budget() -> None:
    content = document({"cast_fp8_e4m3": {"": scope("fp8_e4m3")}}, None)
    content["plans"]["cast_fp8_e4m3"]["verification"] = {"measured_error": None}
    for text in snippets(content).values():
        assert "no plan can be run, since torch cannot compute in the plans' formats" in words(text)
        assert "budget" not in text


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        ((document(BOTH, None), "tensorrt"), "no-such-tool"),
        ((document(BOTH, None), "hf", "cast_fp8"), "no-such-plan"),
        (("nowhere/plan.json", "hf"), "missing-plan"),
        ((3, "hf"), "bad-plan"),
        (({"strategy": "cast", "format": "fp16", "scopes": LOW}, "hf"), "bad-plan"),
        (({**document(BOTH, None), "tied_parameters": ["a"]}, "hf"), "bad-plan"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(arguments: tuple[Any, ...], slug: str) -> None:
    with refused(AuditorError, slug):
        snippet(*arguments)


@pytest.mark.parametrize(
    "options", [{}, {"hostile": True}, {"recommended": None}, {"formats": ("bf16",)}, {"empty": True}]
)
def test_an_audit_gives_what_its_plan_json_gives(options: dict[str, Any]) -> None:
    audit: Audit = make_audit(**options)
    if not audit.plans:
        assert all(line.startswith("#") for text in snippets(audit).values() for line in text.splitlines())
        return
    assert snippets(audit) == snippets(json.loads(json.dumps(audit.to_dict())))
    for text in snippets(audit).values():
        ast.parse(text)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(lambda name: name.strip("."))
AWKWARD = ("\"; import os; os.system('x') #", "'''", '"""\nraise', "\\", "{0}%s${y}", "\u2028x", "a\r\nb = 1", "*")


def skeleton(text: str) -> str:
    """The syntax tree, every string and every table replaced."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict):
            parts = node.value.elts if isinstance(node.value, ast.List) else [*node.value.keys, *node.value.values]
            assert None not in parts
            inside = [each for part in parts for each in ast.walk(part)]
            assert not any(isinstance(each, ast.Call | ast.Lambda | ast.NamedExpr) for each in inside)
            node.value = ast.Constant("")
    return ast.dump(tree)


@settings(max_examples=40, deadline=None)
@given(name=st.one_of(NAMES, st.sampled_from(AWKWARD)), tool=st.sampled_from(tuple(TOOLS)))
def test_whatever_a_name_holds_only_strings_differ(name: str, tool: str) -> None:
    def text(name: str) -> str:
        scopes = {"": scope("fp16"), name: scope("fp32")}
        content = document({}, None)
        for strategy in ("autocast", "cast"):
            key = f"{strategy} {name}"
            content["plans"][key] = {
                **document({"cast_fp16": scopes}, None)["plans"]["cast_fp16"],
                "name": key,
                "strategy": strategy,
            }
        content["recommended"] = f"autocast {name}"
        content["tied_parameters"] = [[f"{name}.weight", "other.weight"]] if tool == "hf" else []
        return snippet(content, tool)

    assert skeleton(text(name)) == skeleton(text("norm"))


@given(name=NAMES)
def test_a_pattern_finds_the_module_of_that_name_and_no_other(name: str) -> None:
    """As transformers reads them: `*` becomes `.*`, and each is searched in the name of a weight."""
    scopes = {"": scope("fp16"), name: scope("fp32"), f"{name}.low": scope("fp16")}
    audit = audit_in(document({"cast_fp16": scopes}, None))
    wanted = patterns(audit, audit.plans["cast_fp16"])
    found = [re.compile(f"(?P<g0>{pattern.replace('*', '.*')})") for pattern in wanted]

    def kept(weight: str) -> bool:
        return any(pattern.search(weight) for pattern in found)

    assert kept(f"{name}.weight")
    assert kept(f"{name}.lower.weight")
    assert not kept(f"{name}.low.weight")
    assert not kept(f"{name}0.{name}.weight")
    assert not kept(f"{name}2.weight")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real audit saves."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    folder = tmp_path_factory.mktemp("audit")
    auditor.audit(model, normal(16, 8), max_error=2e-3, device="cpu").save(folder)
    return folder


def test_the_verb_prints_what_the_function_returns(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = saved / "plan.json"
    assert cli.main(["snippet", str(plan), "--for", "fsdp2", "--plan", "cast_fp16"]) == 0
    assert capsys.readouterr().out == auditor.snippet(plan, "fsdp2", "cast_fp16")
    assert cli.main(["snippet", str(saved), "--for", "fsdp2", "--plan", "cast_fp16"]) == 0
    assert capsys.readouterr().out == auditor.snippet(saved, "fsdp2", "cast_fp16")
    assert cli.main(["snippet", str(plan)]) == 0
    printed = capsys.readouterr().out
    ast.parse(printed)
    titles = [TOOLS[key].title for key in snippets(document(BOTH, "autocast_fp16"))]
    assert [title for title in titles if f"# {title}:" not in printed] == []


def test_the_verb_does_not_wait_for_torch(saved: Path, root: Path) -> None:
    code = "import sys; from auditor import cli; cli.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "snippet", str(saved / "plan.json")]
    assert subprocess.run(command, cwd=root, capture_output=True).returncode == 0


# The snippet for FSDP2, run on the CPU with gloo: the sharded model computes what the patched one does, and trains.
# tests/unit/artefact/test_distributed.py has two processes.


pytestmark = pytest.mark.usefixtures("process_group")


class Deep(Net):
    """An island that holds no parameter, and a head in it that is low again."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Softmax(-1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(self.act(x) * 4, scale)


SCOPES = {"act": "fp32", "norm": "fp32", "head": "fp32", "head.0": "low"}


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("root", ["low", "fp32"])
def test_a_cast_plan_shards_into_its_scopes(fmt: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = {path: scope("fp32" if kept == "fp32" else fmt) for path, kept in {"": root, **SCOPES}.items()}
    if root == "fp32":
        scopes |= {"first": scope(fmt)}
    name, x = f"cast_{fmt}", normal(6, 4)
    shard = pasted(snippet(document({name: scopes}, name), "fsdp2"), monkeypatch)["shard"]
    model = shard(seeded(Deep), blocks=["head.2"])
    output = model(x)
    with torch.no_grad():
        expected = apply_plan(seeded(Deep), plan("cast", scopes, fmt))(x)
    assert torch.equal(output, expected)
    assert output.dtype is expected.dtype
    output.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # the shards


def test_an_autocast_plan_gathers_in_fp32_and_autocast_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = {"": scope("bf16"), "norm": scope("fp32")}
    text = snippet(document({"autocast_bf16": scopes}, "autocast_bf16"), "fsdp2")
    shard = pasted(text, monkeypatch, seeded(Net), {"autocast_bf16": scopes})["shard"]
    model = shard(seeded(Net), blocks=["first", "head"])
    output = model(normal(6, 4))
    assert torch.equal(output, apply_plan(seeded(Net), plan("autocast", scopes))(normal(6, 4)))
    output.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_a_weight_tied_across_scopes_is_said_to_be_out_of_reach() -> None:
    split = document({"cast_bf16": {"": scope("bf16"), "head": scope("fp32")}}, "cast_bf16", tied(5, 4))
    text = snippet(split, "fsdp2")
    assert all(line.startswith("#") for line in text.splitlines())
    assert "'embed.weight' and 'head.weight' are one weight" in text
    together = document({"cast_bf16": {"": scope("bf16")}}, "cast_bf16", tied(5, 4))
    assert "def shard" in snippet(together, "fsdp2")


def twice() -> nn.Module:
    one = nn.Linear(4, 4)
    return Model(lambda m, x: m.last(m.two(m.one(x))), one=one, two=one, last=nn.Linear(4, 2))


def test_a_shared_module_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = {"": scope("bf16"), "one": scope("fp32"), "two": scope("fp32")}
    text = snippet(document({"cast_bf16": scopes}, "cast_bf16", twice()), "fsdp2")
    model = pasted(text, monkeypatch)["shard"](seeded(twice))
    assert torch.equal(model(normal(2, 4)), apply_plan(seeded(twice), plan("cast", scopes))(normal(2, 4)))
