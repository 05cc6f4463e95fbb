"""The training step of the GradScaler snippet, run with torch's own scaler on the CPU."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from auditor.records.training import LossScale, Training
from auditor.snippets import snippet
from tests.support.patching import Net, scope
from tests.support.snippets import document, pasted
from tests.support.subjects import normal, seeded


def scopes(fmt: str) -> dict[str, dict[str, str]]:
    return {"": scope(fmt), "norm": scope("fp32")}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch).float(), torch.ones(len(batch), 3))


def prepared(fmt: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, nn.Module, torch.amp.GradScaler]:
    name = f"autocast_{fmt}"
    text = snippet(document({name: scopes(fmt)}, name), "gradscaler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = pasted(text, monkeypatch, seeded(Net), {name: scopes(fmt)})
    model, scaler = found["prepare"](seeded(Net))
    return found, model, scaler


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_step_lowers_the_loss_and_moves_fp32_weights(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, model, scaler = prepared(fmt, monkeypatch)
    assert scaler.is_enabled() == (fmt == "fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = [float(found["train_step"](model, scaler, optimizer, loss, normal(8, 4), max_norm=1.0)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_scale_that_an_audit_of_training_recommends_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    content = document({"autocast_fp16": scopes("fp16")}, "autocast_fp16")
    assert "an audit with --mode training finds one" in snippet(content, "gradscaler").replace("\n# ", " ")
    window = LossScale(1.0, 1024.0, 512.0, 0.0, 0.0, None, "", None, {}, {})
    of = {"format": "fp16", "recommendation": "", "plan": None, "loss": 0.0, "loss_source": "", "bf16": None}
    training = Training(fp16=window, errors={}, advice=(), **of)
    text = snippet(content | {"training": json.loads(json.dumps(asdict(training)))}, "gradscaler")
    assert "comes from this model's own gradients" in text.replace("\n# ", " ")
    found = pasted(text, monkeypatch, seeded(Net), {"autocast_fp16": scopes("fp16")})
    _, scaler = found["prepare"](seeded(Net))
    assert scaler.get_scale() == 512
