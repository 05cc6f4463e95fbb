"""Other quantization pipelines: the real libraries run on small models, and on gradients with planted magnitudes."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.graphs.pipelines import STEPS
from auditor.numerics.metrics import output_error
from auditor.records.audit import Audit
from auditor.records.quantization import PipelineRun
from auditor.report.reporters import html
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded

X = normal(16, 64)


def net() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))


def run_of(audit: Audit, name: str) -> PipelineRun:
    (found,) = [run for run in audit.pipelines if run.name == name]
    return found


def test_both_pipelines_are_run_for_the_schemes_that_they_resemble() -> None:
    pytest.importorskip("torchao.quantization.pt2e", exc_type=ImportError)
    model = net()
    audit = auditor.audit(model, X, formats=("int8", "int8_static"), max_error=0.05)
    theirs = torch.ao.quantization.quantize_dynamic(model)
    error = output_error([model(X).detach()], [theirs(X).detach()])
    dynamic, static = run_of(audit, "quantize_dynamic"), run_of(audit, "PT2E INT8")
    assert dynamic.error == pytest.approx(error, rel=1e-4)
    assert dynamic.said.startswith("2 modules in INT8")
    assert static.error is not None
    assert 1e-3 < static.error < 0.05
    assert static.said.startswith("2 weights in INT8")
    assert all(type(module) is nn.Linear for module in (model[0], model[2]))
    assert "PT2E INT8" in html(audit)


def test_other_schemes_run_no_pipeline() -> None:
    assert auditor.audit(net(), X, formats="int8_weights").pipelines == ()


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.quantize_pt2e", None)
    run = run_of(auditor.audit(net(), X, formats="int8_static"), "PT2E INT8")
    assert run.error is None
    assert run.said.startswith("not installed: ModuleNotFoundError")


def test_a_failure_is_one_line() -> None:
    pytest.importorskip("torchao.quantization.pt2e", exc_type=ImportError)

    branches = Model(lambda m, x: m.inner(x) if float(x.sum()) > 1e9 else m.inner(-x), inner=nn.Linear(64, 8))
    run = run_of(auditor.audit(branches.eval(), X, formats="int8_static"), "PT2E INT8")
    assert run.error is None
    assert run.said.startswith("failed: ")
    assert "\n" not in run.said


def test_the_8_bit_state_of_adam_loses_small_gradients_beside_large_ones() -> None:
    pytest.importorskip("torchao.optim", exc_type=ImportError)

    def scaled(m: Any, x: Tensor) -> Tensor:
        """The gradient of `alike` is 1 everywhere; that of `spread` is 1e-4 but for one entry of each block of 256."""
        return m.alike(x).sum(-1) + m.spread(x * m.factor).sum(-1) + m.small(x).sum(-1)

    layers = {name: nn.Linear(256, rows, bias=False) for name, rows in (("alike", 64), ("spread", 64), ("small", 2))}
    model = Model(scaled, **layers, factor=torch.full((256,), 1e-4).index_fill(0, torch.tensor(0), 1.0))
    asked = {"mode": "training", "formats": ("bf16", "int8_weights"), "device": "cpu"}
    audit = auditor.audit(model, torch.ones(1, 256), loss_fn=lambda out: out.sum(), **asked)
    run = run_of(audit, "Adam8bit")
    assert run.said.startswith("2 of 3 parameters")  # 512 values are too few: torchao takes at least 4,096
    # Squares of 1e-4 are 1e-8 of the largest in their block, below the smallest value of the 8-bit map: they become 0.
    assert run.parts["small"] < 1e-4
    assert run.parts["alike"] < 0.02
    assert run.parts["spread"] > 0.5
    assert STEPS > 1  # the state of the first step is exact
