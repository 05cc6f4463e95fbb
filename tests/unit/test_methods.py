"""Methods of a model are audited by name, and what an audit did not run is said when its plan is applied."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli import main
from auditor.loading.subject import load
from tests.support.subjects import normal, seeded

SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(8, 16), nn.Linear(16, 8)

    def decode(self, z):
        return (self.decoder(z) * 1e6).relu().sqrt()

    def forward(self, x):
        return self.encoder(x)

    @classmethod
    def small(cls):
        return cls()


def get_model():
    return Net()


def get_inputs():
    return torch.ones(4, 16)


net = Net()
"""


class Net(nn.Module):
    """Forward runs the encoder, `decode` the decoder, whose result overflows FP16."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 16), nn.Linear(16, 8)

    def decode(self, z: Tensor) -> Tensor:
        return (self.decoder(z) * 1e6).relu().sqrt()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def audited(target: Any, inputs: Tensor) -> auditor.Audit:
    return auditor.audit(target, inputs, formats=["fp16"], strategies=["autocast"])


def test_a_bound_method_is_audited_and_its_plan_fits_the_model() -> None:
    model = seeded(Net)
    before = dict(vars(model))
    audit = audited(model.decode, normal(4, 16))
    assert vars(model) == before
    assert {report.node.owner for report in audit.nodes} == {"", "decoder"}
    assert audit.plans["autocast_fp16"].is_verified
    assert audit.plans["autocast_fp16"].scopes[""].precision == "fp32"  # the product overflows FP16
    with torch.no_grad():
        expected = model.decode(normal(4, 16))
        result = auditor.apply(model, audit, "autocast_fp16").decode(normal(4, 16))
    assert not torch.equal(result, expected)
    assert torch.allclose(result, expected, rtol=1e-2)


def test_modules_that_the_audited_call_did_not_run_are_named_when_the_plan_is_applied() -> None:
    model = seeded(Net)
    audit = audited(model, normal(4, 8))
    with pytest.warns(UserWarning, match=r"did not run 'decoder': under this plan they run in FP16"):
        auditor.apply(model, audit)


def test_a_plan_of_a_call_that_runs_everything_is_applied_without_a_warning() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    audit = audited(model, normal(4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auditor.apply(model, audit)


@pytest.mark.parametrize("symbol", ["net.decode", "Net.decode", "get_model.decode"])
def test_a_target_may_name_a_method(symbol: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SOURCE)
    subject = load(f"{tmp_path / 'model.py'}:{symbol}")
    assert subject.origin is not None
    assert (subject.origin.symbol, subject.origin.method) == (symbol.partition(".")[0], "decode")
    assert subject.model(torch.ones(1, 16)).shape == (1, 8)


@pytest.mark.parametrize("symbol", ["Net.small", "net", "get_model", "Net.forward"])
def test_a_target_that_names_no_method_is_what_it_was(symbol: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SOURCE.replace("torch.ones(4, 16)", "torch.ones(4, 8)"))
    subject = load(f"{tmp_path / 'model.py'}:{symbol}")
    assert subject.origin is not None
    assert subject.origin.method == ""
    assert subject.model(torch.ones(1, 8)).shape == (1, 16)


def test_a_method_is_verified_in_a_fresh_process_and_the_file_builds_the_whole_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(SOURCE)
    target, out = f"{tmp_path / 'model.py'}:net.decode", tmp_path / "out"
    assert main([target, "--formats", "fp16", "--strategies", "cast", "--quick", "--out", str(out)]) in (0, 1)
    capsys.readouterr()
    plan = json.loads((out / "plan.json").read_text())["plans"]["cast_fp16"]
    assert plan["verification"]["failure"] is None
    namespace: dict[str, Any] = {"__name__": "patched_model", "__file__": str(out / "patched_model.py")}
    exec(compile((out / "patched_model.py").read_text(), "patched_model.py", "exec"), namespace)
    built = namespace["build"](plan="cast_fp16")
    assert built(torch.ones(1, 8)).shape == (1, 16)
    assert built.decode(torch.ones(1, 16)).isfinite().all()
