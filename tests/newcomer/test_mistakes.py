"""What a newcomer gets wrong on the first day, and what they are told."""

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import cli
from auditor.asked import Command, command_of
from auditor.errors import AuditorError, LoadError, PlanError
from auditor.records import Audit
from tests.support.refusing import refused
from tests.support.subjects import normal


def net(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), activation(), nn.Linear(8, 8)).eval()


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(net(), normal(4, 8), device="cpu")


@pytest.fixture(scope="module")
def folder(audit: Audit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    audit.save(folder)
    return folder


def patched_model(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(folder / "patched_model.py")))


class Other(nn.Module):
    """Of as many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


FOREIGN = {
    "more parameters": (lambda: nn.Linear(9, 9), "144 parameters, this model has 90"),
    "other names": (Other, "another model than this Other"),
    "another class inside": (lambda: net(nn.GELU), "another model than this Sequential"),
    "other shapes": (lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2, bias=False)), "parameters"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_plan_without_scopes_is_for_its_own_model_alone(name: str, audit: Audit, folder: Path) -> None:
    build, said = FOREIGN[name]
    assert all(set(plan.scopes) == {""} for plan in audit.plans.values())
    model: nn.Module = build()
    for plan in (audit, auditor.load(folder), auditor.load_plan(folder), folder / "plan.json"):
        with refused(PlanError, "plan-mismatch", match=said):
            auditor.apply(model, plan, "cast_bf16")
    with pytest.raises(ValueError, match="the plan was made for"):
        patched_model(folder).apply(model, "cast_bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any("forward" in vars(module) for module in model.modules())


def test_its_own_model_may_have_other_weights_and_be_wrapped(audit: Audit, folder: Path) -> None:
    other = copy.deepcopy(net())
    with torch.no_grad():
        other[0].weight.mul_(2)
    wrapped = nn.DataParallel(net())
    for model in (other, wrapped):
        for patch in (
            lambda m: auditor.apply(m, folder, "cast_bf16"),
            lambda m: patched_model(folder).apply(m, "cast_bf16"),
        ):
            patched = patch(copy.deepcopy(model))
            assert {parameter.dtype for parameter in patched.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["autocast_bf16", "cast_fp16"])
def test_a_patched_model_is_not_audited_again(name: str, audit: Audit) -> None:
    """Its FP32 runs would be no reference."""
    model = auditor.apply(net(), audit, name)
    with refused(
        LoadError, "patched-model", match="a plan has patched this Sequential already: give the original model"
    ):
        auditor.audit(model, normal(4, 8))


INSTANCE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
def get_inputs(): return torch.ones(4, 8)
"""


def test_a_model_at_module_level_is_built_as_often_as_one_likes(here: Path) -> None:
    Path("at_module_level.py").write_text(INSTANCE)
    assert cli.main(["at_module_level.py", "--quick", "--strategies", "cast", "-q", "--out", "out"]) == 0
    module = patched_model(here / "out")
    first, second = module.build(plan="cast_fp16"), module.build(plan="cast_fp16")
    original = module.original()
    assert first is not second
    assert torch.equal(first.weight, second.weight)
    assert (first.weight.dtype, original.weight.dtype) == (torch.float16, torch.float32)
    assert "forward" not in vars(original)


def said_of(source: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error that a command ends in."""
    if source:
        Path("mine.py").write_text(source)
    assert cli.main(words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


LIST = """
import torch
model = torch.nn.Linear(4, 4)
def get_inputs(): return [torch.ones(2, 4), torch.ones(3, 4)]
"""

HELPERS = """
import torch
def tiny_llama_config(): return {}
def tiny_helper(): return 1
class Config: pass
class TinyLlama(torch.nn.Linear): pass
"""

NUMBER = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x): return super().forward(x).mean().item()
def get_model(): return Net(4, 4)
def get_inputs(): return torch.ones(2, 4)
"""

MADE_OF_A_NUMBER = NUMBER.replace(
    "return super().forward(x).mean().item()", "return x.new_tensor(super().forward(x).sum().item()).long()"
)


@pytest.mark.parametrize(
    ("source", "words", "said"),
    [
        (LIST, ["mine.py"], "A list of tensors is one call; several batches are written [(t1,), (t2,)]"),
        (HELPERS, ["mine.py:TinyLama"], "did you mean TinyLlama? It defines TinyLlama, tiny_llama_config, tiny_helper"),
        (HELPERS, ["mine.py:tinyllama"], "did you mean TinyLlama?"),
        (HELPERS, ["mine.py:tiny_helpr"], "did you mean tiny_helper?"),
        (HELPERS, ["mine.py:zzz"], "has no 'zzz': it defines TinyLlama, "),
        (NUMBER, ["mine.py"], "mine returns no tensor, so there is no output to compare"),
        (MADE_OF_A_NUMBER, ["mine.py"], "no floating-point operation leads to the tensors that mine returns"),
        (NUMBER, ["mine.py", "--quick", "--onnx"], "--onnx needs strategy graph, and --quick audits only autocast"),
        ("", ["expain", "SFT001"], "no verb, file or module is called 'expain': did you mean explain?"),
        ("", ["expain"], "did you mean explain?"),
        ("", ["explain-layr", "out", "head"], "did you mean explain-layer?"),
    ],
)  # fmt: skip
def test_the_error_says_what_was_meant(
    source: str,
    words: list[str],
    said: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in said_of(source, words, capsys)


def test_a_module_that_is_called_nearly_like_a_verb_is_a_target(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rule.py").write_text(INSTANCE)
    assert cli.main(["rule", "--dry-run"]) == 0
    assert "rule" in capsys.readouterr().out


def test_quick_and_onnx_go_together_where_programs_are_asked_for() -> None:
    """Beside the refusal: `--strategies graph` is what it advises."""
    assert command_of({"quick": True, "onnx": "fp32", "strategies": "graph"}, Command).strategies == ("graph",)
    assert command_of({"onnx": "fp32"}, Command).strategies == ("autocast", "cast", "graph")
    with pytest.raises(AuditorError, match="or add --strategies graph"):
        command_of({"quick": True, "onnx": "fp32"}, Command)
