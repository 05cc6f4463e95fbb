"""A strategy that only this file knows of: weights stored low, everything computed in FP32. It is planned like any other."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.artefact.base import Strategy
from auditor.artefact.emit import emit
from auditor.artefact.runtime import Runtime, by_scope, call, convert
from auditor.artefact.shipped import Cast, CastRuntime
from auditor.artefact.strategies import names, temporary_strategy
from auditor.cli import main
from auditor.document.read import load_plan
from auditor.numerics.formats import dtype_of
from auditor.numerics.metrics import output_error
from auditor.records import Plan, ScopeChoice

MODEL = """
from collections import OrderedDict
import torch
from torch import nn

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(16, 64), norm=nn.LayerNorm(64), act=nn.GELU(), last=nn.Linear(64, 8)))

def get_inputs():
    return (torch.randn(32, 16, generator=torch.Generator().manual_seed(1)),)
"""
PARAMETERS = (16 * 64 + 64) + (64 + 64) + (64 * 8 + 8)
FORMATS = ("fp16", "bf16")


class StoredRuntime(Runtime):
    """A module holds its low weights in FP32 for as long as it runs."""

    @staticmethod
    def run(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
        """One call, on weights that were raised for it."""
        own = dict(module._parameters)
        module._parameters.update({name: convert(weight, torch.float32) for name, weight in own.items()})
        try:
            return call(module, inner, args, kwargs)
        finally:
            module._parameters.update(own)

    @staticmethod
    def storage_precisions(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """Parameters alone; buffers stay FP32."""
        return by_scope(list(model.named_parameters(remove_duplicate=False)), scopes)

    @staticmethod
    def wrapper_of(
        module: nn.Module, paths: list[str], scopes: dict[str, Any], stored: dict[int, str]
    ) -> dict[str, Any] | None:
        """Every module with a low weight of its own, whether the plan lists it or not."""
        own = {stored.get(id(weight), "fp32") for weight in module._parameters.values() if weight is not None}
        low = own - {"fp32"}
        return {"precision": low.pop(), "output": None} if low else None


class Stored(Strategy):
    """For models that do not fit, on devices that have no fast low arithmetic."""

    name = "stored"
    title = "in storage alone"
    runtime = StoredRuntime
    stores = frozenset({"parameter"})
    raises_weights = True
    seconds_per_byte = 1e-12

    def computes_in(self, precision: str) -> str:
        return "fp32"

    def gains(self, plan: Plan) -> bool:
        return any(choice.precision != "fp32" for choice in plan.scopes.values())


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    found: dict[str, Any] = {}
    exec(MODEL, found)
    with torch.random.fork_rng(devices=[]):
        return found["get_model"]().eval(), found["get_inputs"]()[0]


def error_by_hand(fmt: str, but: tuple[str, ...] = ()) -> float:
    """Of the model whose weights were rounded, those of some modules excepted."""
    model, x = model_and_input()
    low = copy.deepcopy(model)
    for name, parameter in low.named_parameters():
        if not name.startswith(but or "-"):
            parameter.data = parameter.data.to(dtype_of(fmt)).float()
    with torch.no_grad():
        return output_error([model(x)], [low(x)])


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with temporary_strategy(Stored()):
        yield
    assert "stored" not in names()


@pytest.fixture(scope="module")
def written(known: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes of the model's file: its plans were verified from `patched_model.py`, in fresh processes."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "net.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["net.py", "--strategies", "stored", "--device", "cpu", "--out", "out", "-q"]) == 0
    return folder / "out"


@pytest.mark.parametrize("fmt", FORMATS)
def test_it_has_a_plan_that_is_verified_without_registration(written: Path, fmt: str) -> None:
    """Its error is that of rounded weights, which take half; nothing is faster."""
    audit = auditor.load(written)
    plan = audit.plans[f"stored_{fmt}"]
    assert {path: choice.precision for path, choice in plan.scopes.items()} == {"": fmt}
    assert plan.is_verified
    assert plan.measured_error == pytest.approx(error_by_hand(fmt), rel=1e-5)
    assert plan.predicted_error == pytest.approx(plan.measured_error, rel=0.3)
    assert audit.baselines[plan.name].measured_error == pytest.approx(plan.measured_error, rel=1e-5)
    assert (plan.memory.weights, plan.fp32_memory.weights) == (2 * PARAMETERS, 4 * PARAMETERS)
    assert (plan.low_precision_flops, plan.predicted_speedup) == (0.0, 1.0)
    assert audit.recommended == "stored_fp16"
    assert f"{fmt.upper()} in storage alone" in (written / "report.html").read_text()


def test_a_budget_that_rounding_all_weights_breaks_keeps_a_module_in_fp32() -> None:
    """Rounding every weight costs 0.00174, all but the last layer's 0.00124; the last layer is the cheaper one to keep."""
    budget = 1.3 * error_by_hand("bf16", but=("last",))
    assert budget < error_by_hand("bf16")
    model, x = model_and_input()
    found = auditor.audit(model, x, strategies=("stored",), formats=("bf16",), device="cpu", max_error=budget)
    plan = found.plans["stored_bf16"]
    assert {path: choice.precision for path, choice in plan.scopes.items()} == {"": "bf16", "last": "fp32"}
    assert plan.is_verified
    assert plan.measured_error == pytest.approx(error_by_hand("bf16", but=("last",)), rel=1e-6)


def test_it_is_applied_from_an_audit_and_from_a_file(written: Path) -> None:
    (model, x), (other, _) = model_and_input(), model_and_input()
    auditor.apply(model, auditor.load(written), "stored_bf16")
    auditor.apply(other, load_plan(written / "plan.json"), "stored_bf16")
    with torch.no_grad():
        assert model(x).dtype is torch.float32
        assert torch.equal(model(x), other(x))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


class HalfBuffers(CastRuntime):
    """As a cast model, but that buffers stay FP32."""

    @staticmethod
    def storage_precisions(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """Parameters alone."""
        return by_scope(list(model.named_parameters(remove_duplicate=False)), scopes)


class Halfway(Cast):
    name = "halfway"
    runtime = HalfBuffers


def test_a_runtime_that_builds_on_another_brings_it_along(tmp_path: Path) -> None:
    scopes = {"": ScopeChoice("bf16")}
    plans = {f"{name}_bf16": Plan(f"{name}_bf16", name, "bf16", scopes, 0.0, 1.0, 1.0) for name in ("cast", "halfway")}
    with temporary_strategy(Halfway()):
        text = emit(None, 9 * 8, plans, "halfway_bf16", tmp_path)
    assert [text.count(f"class {name}(") for name in ("CastRuntime", "HalfBuffers", "AutocastRuntime")] == [1, 1, 0]
    found: dict[str, Any] = {"__name__": "patched_model"}
    exec(compile(text, "patched_model.py", "exec"), found)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1, bias=False))
    found["apply"](model)
    dtypes = {name: x.dtype for name, x in model.state_dict().items() if x.is_floating_point()}
    assert dtypes == {
        "0.weight": torch.bfloat16,
        "1.running_mean": torch.float32,
        "1.running_var": torch.float32,
        "2.weight": torch.bfloat16,
    }
