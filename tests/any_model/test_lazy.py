"""Lazy layers of a file: their first weights come from a first call, the same ones in the process that verifies."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor import cli
from auditor.capture.emulation import as_on
from auditor.errors import AuditorError
from auditor.isolation.answer import answer
from auditor.numerics.metrics import output_error

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.LazyLinear(4)

    def forward(self, x):
        x.mul_(0.5)  # the caller's own, at every call
        return self.last(self.norm(self.conv(x)).flatten(1).relu())

def get_inputs(): return torch.randn(2, 3, 5, 5)
"""


def test_plans_of_lazy_layers_are_verified_and_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    words = ("model.py", "--formats", "bf16", "--strategies", "cast", "--out", "out", "-q", "--fail-on", "never")
    assert cli.main(words) == 0
    (plan,) = json.loads(Path("out/plan.json").read_text())["plans"].values()
    assert plan["verified"], plan["failure"]
    spec = importlib.util.spec_from_file_location("patched_model", "out/patched_model.py")
    assert spec is not None and spec.loader is not None
    patched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(patched)
    with pytest.raises(ValueError, match=r"conv\.weight has no shape yet: call the model once"):
        patched.build(plan="cast_bf16")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 5)
    model = patched.original().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        model(x.clone())
    expected = answer(model, ((x,), {}))
    found = answer(patched.apply(model, "cast_bf16"), ((x,), {}), around=lambda: as_on("cpu"))
    assert output_error(expected, found) == pytest.approx(plan["measured_error"], rel=1e-6)


def test_a_plan_for_a_model_without_weights_is_refused_in_one_line() -> None:
    audit = auditor.audit(nn.Linear(2, 2), torch.ones(1, 2), formats=("bf16",), strategies=("cast",), device="cpu")
    with pytest.raises(AuditorError, match="call the model once") as refused:
        auditor.apply(nn.LazyLinear(2), audit, "cast_bf16")
    assert refused.value.slug == "lazy-weights"
