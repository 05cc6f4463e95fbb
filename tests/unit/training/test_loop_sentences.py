"""The loop that the report offers to copy, run as it is written."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.report.training import loop_code
from auditor.snippets.trainers import training_code
from tests.unit.training.conftest import Trained, loss_fn, made
from tests.unit.training.own_steps import audited


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_the_loop_trains_in_the_steps_of_the_snippet(
    trained: Trained, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained.audit.training is not None
    audit = replace(trained.audit, training=replace(trained.audit.training, format=fmt))
    audit.save(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "patched_model", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = loop_code(audit)
    assert code is not None
    assert code.startswith(training_code(audit, fmt, f"autocast_{fmt}"))
    assert "put no torch.autocast" in " ".join(code.replace("#", " ").split())
    assert "with torch.autocast" not in code
    model, tokens, targets = made()
    exec(compile(code, "loop.py", "exec"), {"model": model, "loader": [(tokens, targets)] * 3, "loss_fn": loss_fn})
    sys.modules.pop("patched_model", None)
    assert not torch.equal(model.up.weight, made()[0].up.weight)


@dataclass(frozen=True)
class Both:
    y: Tensor
    more: tuple[Tensor, ...]
    name: str = "both"


class Pair(nn.Module):
    """Answers in every way that a loss can be handed on, or be the answer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.layer(x)
        if self.way == "tensors":
            return {"y": y, "more": (y.tanh(),)}
        if self.way == "dataclass":
            return Both(y, (y.tanh(),))
        assert labels is not None
        loss = nn.functional.mse_loss(y.float(), labels)
        return {"loss": loss} if self.way == "mapping" else SimpleNamespace(loss=loss)


@pytest.mark.parametrize("way", ["tensors", "dataclass", "mapping", "attribute"])
def test_the_loop_runs_whatever_the_model_returns(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def squares(outputs: Any, targets: Tensor) -> Tensor:
        y, more = (outputs.y, outputs.more) if way == "dataclass" else (outputs["y"], outputs["more"])
        assert y.dtype is more[0].dtype is torch.float32
        return (y - targets + more[0]).square().mean()

    torch.manual_seed(0)
    model, (x, y) = Pair(way), (torch.randn(4, 8), torch.randn(4, 8))
    own = way not in ("tensors", "dataclass")
    found, training = audited(
        model, {"x": x, "labels": y} if own else (x, y), None if own else squares, strategies="autocast", formats="bf16"
    )
    assert training.format is not None
    assert found.to_dict()  # what the file has of it
    assert training.returned == ("tensors" if way == "dataclass" else way)
    found.save(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "patched_model", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = model.layer.weight.detach().clone()
    loader = [{"x": x, "labels": y}] * 2 if own else [(x, y)] * 2
    names: dict[str, Any] = {"model": model, "loader": loader, "loss_fn": squares}
    exec(compile(loop_code(found) or "", "loop.py", "exec"), names)
    sys.modules.pop("patched_model", None)
    assert not torch.equal(before, model.layer.weight)


def test_without_a_plan_the_loop_has_the_region_that_was_measured() -> None:
    torch.manual_seed(0)
    found, training = audited(
        nn.Linear(8, 8), (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss, strategies=("cast",)
    )
    assert training.format is not None
    code = loop_code(found)
    assert code is not None
    assert "    with torch.autocast(DEVICE, dtype=torch." in code
    assert "patched_model" not in code
