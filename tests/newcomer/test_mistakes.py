"""What a newcomer gets wrong on the first day, and what they are told."""

import copy
import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import cli
from auditor.asked import Command, command_of
from auditor.errors import AuditorError, LoadError, PlanError
from auditor.records import Audit
from tests.any_model.holding import Two
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.support.subjects import normal, seeded


def net(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), activation(), nn.Linear(8, 8)))


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


FOREIGN = {
    "more parameters": (lambda: nn.Linear(9, 9), "144 parameters, this model has 90"),
    "other names": (Two, "another model than this Two"),  # of as many parameters
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
        LoadError, "patched-model", match="a plan has already patched this Sequential: give the original model"
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


LIST = """
import torch
model = torch.nn.Linear(4, 4)
def get_inputs(): return [torch.ones(2, 4), torch.ones(3, 5)]
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
        (NUMBER, ["mine.py", "--quick", "--onnx"], "--quick audits only autocast: leave --quick out, or pass --strategies graph"),
        ("", ["expain", "SFT001"], "no verb, file or module is called 'expain': did you mean explain?"),
        ("", ["explain-layr", "out", "head"], "did you mean explain-layer?"),
    ],
)  # fmt: skip
def test_the_one_line_of_the_error_says_what_was_meant(
    source: str, words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if source:
        Path("mine.py").write_text(source)
    assert cli.main(words) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert said in line


def test_a_module_that_is_called_nearly_like_a_verb_is_a_target(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rule.py").write_text(INSTANCE)
    assert cli.main(["rule", "--dry-run"]) == 0
    assert "rule" in capsys.readouterr().out
    Path("installed").mkdir()
    Path("rule.py").rename("installed/explains.py")
    monkeypatch.syspath_prepend("installed")
    assert cli.main(["explains", "--dry-run"]) == 0


def test_quick_and_onnx_go_together_where_programs_are_asked_for() -> None:
    """Beside the refusal: `--strategies graph` is what it advises."""
    assert command_of({"quick": True, "onnx": "fp32", "strategies": "graph"}, Command).strategies == ("graph",)
    assert command_of({"onnx": "fp32"}, Command).strategies == ("autocast", "cast", "graph")


# Arguments of a wrong type, and functions that raise or return what they must not, each end in one clear AuditorError.


def state_of(model: nn.Module) -> list[Any]:
    """What an audit must leave alone."""
    named = [(name, value.tolist()) for name, value in model.state_dict().items()]
    return [*named, *((path, module.training, sorted(vars(module))) for path, module in model.named_modules())]


def refusal(**given: Any) -> AuditorError:
    """The error of an audit with these arguments, once the model was found as it was."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Function(torch.exp)))
    before = state_of(model)
    quick = {"formats": "bf16", "strategies": "cast", "quick": True, "device": "cpu"}
    with pytest.raises(AuditorError) as caught:
        auditor.audit(model, given.pop("example_inputs", normal(4, 8)), **{**quick, **given})
    assert "\n" not in str(caught.value)
    assert state_of(model) == before
    return caught.value


def raising(*given: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("given", "slug", "said"),
    [
        ({"formats": None}, "bad-option", "mxfp4 or nvfp4, not None"),
        ({"formats": [["fp16"]]}, "bad-option", "not a value of type list"),
        ({"strategies": [None]}, "bad-option", "strategies takes autocast"),
        ({"max_error": "x"}, "bad-option", "max_error takes a positive number, not 'x'"),
        ({"seed": "x"}, "bad-option", "seed takes a whole number from 0 to 4294967295, not 'x'"),
        ({"seed": -1}, "bad-option", "seed"),
        ({"metric": 3}, "bad-option", "metric takes a function"),
        ({"progress": 3}, "bad-option", "progress takes True, False or a function"),
        ({"select": "SFT001,NMR"}, "no-rule", "no code begins with 'NMR'"),
        ({"rules": 3}, "bad-option", "rules takes the path of a directory, not 3"),
        ({"criteria": 3}, "bad-criterion", "criteria are strings or a dict"),
        ({"objective": None}, "bad-option", "objective takes"),
        ({"kwargs": ["x"]}, "bad-option", "kwargs takes a dict"),
        ({"example_inputs": 3}, "bad-inputs", "got a int from example_inputs"),
        ({"example_inputs": iter([])}, "bad-inputs", "from example_inputs"),
        ({"example_inputs": (iter([1]),)}, "bad-inputs", "an iterator"),
        ({"loss_fn": 3, "mode": "training"}, "bad-option", "loss_fn takes a function"),
        ({"evaluate": 3}, "missing-score", "evaluate must be a function, func(model)"),
        ({"evaluate": lambda model: None}, "no-score", "is nothing"),
        ({"evaluate": len, "max_drop": "x"}, "bad-option", "max_drop takes a number from 0 on, not 'x'"),
        ({"evaluate": len, "better": 3}, "bad-option", "better takes higher or lower"),
        ({"quick": "no"}, "bad-option", "quick takes True or False, not 'no'"),
        ({"metric": lambda r, c: None}, "bad-callback", "metric=<lambda> returned None: return one number"),
        ({"metric": lambda r, c: "x"}, "bad-callback", "returned a value of type str"),
        ({"metric": lambda r, c: torch.ones(2)}, "bad-callback", "returned a value of type Tensor"),
        ({"metric": lambda r, c: [1.0]}, "bad-callback", "returned a value of type list"),
        ({"metric": lambda r: 1.0}, "bad-callback", "a metric is called as metric(reference, candidate)"),
        ({"metric": raising}, "bad-callback", "metric=raising raised KeyError: 'mine' (test_mistakes.py:"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_of_a_wrong_type_and_a_metric_that_gives_no_number(
    given: dict[str, Any], slug: str, said: str
) -> None:
    error = refusal(**given)
    assert (error.slug, said in str(error)) == (slug, True), str(error)


def test_a_metric_that_raises_late_is_no_failure_of_a_plan() -> None:
    """In runs of plans what the model raises is a verdict; what the metric raises is not."""
    calls = itertools.count()

    def metric(reference: list[Tensor], candidate: list[Tensor]) -> float:
        if next(calls) >= 2:
            raise KeyError("mine")
        return float((reference[0] - candidate[0].float()).abs().max())

    assert refusal(metric=metric, quick=False).slug == "bad-callback"


def test_a_metric_may_refuse_outputs_that_are_not_finite() -> None:
    """As scikit-learn's do: such outputs hold no budget, whatever it would have said of them."""

    def metric(reference: list[Tensor], candidate: list[Tensor]) -> float:
        if not bool(torch.isfinite(candidate[0]).all()):
            raise ValueError("Input contains infinity")
        return float((reference[0] - candidate[0].float()).norm() / reference[0].norm())

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found = auditor.audit(model, 1e5 * normal(4, 8), metric=metric, formats="fp16", strategies="cast", quick=True)
    assert found.baselines["cast_fp16"].finite is False


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("call", [0, 5])
def test_progress_that_raises_ends_the_audit_under_its_name(call: int) -> None:
    calls = itertools.count()

    def progress(stage: str, detail: str, done: int, total: int) -> None:
        if next(calls) == call:
            raise Cancelled("by the user")

    error = refusal(progress=progress)
    assert error.slug == "bad-callback"
    assert str(error).startswith("progress raised Cancelled: by the user (test_mistakes.py:")
    assert isinstance(error.__cause__, Cancelled)


@pytest.mark.parametrize("given", [3, None, ["x"], b"x"], ids=str)
def test_what_is_no_path_or_model_or_name(given: Any, tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), normal(2, 4)
    found = auditor.audit(model, x, formats="bf16", strategies="cast", quick=True)
    calls: list[Callable[[], Any]] = [
        lambda: auditor.load(given),
        lambda: auditor.load_plan(given),
        lambda: found.save(given),
        lambda: auditor.apply(given, found),
        lambda: auditor.apply(model, given),
        lambda: auditor.snippet(given, "hf"),
        lambda: auditor.snippet(found, given),
    ]
    if given is not None:
        calls += [lambda: auditor.apply(model, found, given), lambda: auditor.snippet(found, "hf", given)]
    for call in calls:
        with pytest.raises(AuditorError):
            call()
