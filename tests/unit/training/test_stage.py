"""What a training audit finds, against autograd on the model itself."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

import auditor
from auditor.numerics.formats import FORMATS
from auditor.training.spreads import flushed, spread_of
from tests.unit.training.conftest import Trained, loss_fn, made


def reference_gradients(trained: Trained) -> dict[str, torch.Tensor]:
    """By autograd, over both batches, with dropout as the audit fixed it."""
    model = copy.deepcopy(trained.before)
    model.train()
    found: dict[str, torch.Tensor] = {}
    tokens, targets = trained.batch
    for batch in ((tokens, targets), (tokens.flip(0), targets)):
        model.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss_fn(model(batch[0]), batch[1]).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = torch.cat((found.get(name, torch.zeros(0)), parameter.grad.flatten()))
    return found


def test_parameter_histograms_are_those_of_autograd(trained: Trained) -> None:
    training = trained.audit.training
    assert training is not None
    expected = reference_gradients(trained)
    assert [p.name for p in training.parameters if p.gradient.nonzero] == [
        n for n, g in expected.items() if bool(g.any())
    ]
    for parameter in training.parameters:
        ours, theirs = parameter.gradient, spread_of(expected[parameter.name])
        assert ours.max_abs == pytest.approx(theirs.max_abs, rel=1e-4)
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-4)
        assert flushed(ours.exponents, FORMATS["fp16"]) == pytest.approx(
            flushed(theirs.exponents, FORMATS["fp16"]), abs=0.01
        )
    weights = dict(trained.before.named_parameters())
    assert all(p.weight.max_abs == float(weights[p.name].detach().abs().max()) for p in training.parameters)


def test_a_frozen_parameter_is_left_out(trained: Trained) -> None:
    assert trained.audit.training is not None
    assert "head.weight" not in {p.name for p in trained.audit.training.parameters}


def test_modules_are_the_models_own_and_the_loss(trained: Trained) -> None:
    assert trained.audit.training is not None
    found = {m.module: m for m in trained.audit.training.modules}
    paths = {path for path, _ in trained.before.named_modules()}
    assert set(found) - paths == {"(loss)"}
    assert {"embed", "norm", "up", "down", "head"} <= set(found)
    assert found["up"].low is not None
    assert found["norm"].low is not None  # FP32 itself, and lowered for the linear layer behind it


def test_the_model_comes_back_as_it_was(trained: Trained) -> None:
    before, after = trained.before, trained.model
    assert [m.training for m in before.modules()] == [m.training for m in after.modules()]
    pairs = zip(before.state_dict().items(), after.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert all(p.grad is None for p in after.parameters())
    assert [p.requires_grad for p in before.parameters()] == [p.requires_grad for p in after.parameters()]


def test_trials_bear_the_prediction_out(trained: Trained) -> None:
    training = trained.audit.training
    assert training is not None
    assert training.fp16 is not None
    assert [t.scale for t in training.trials] == [1.0, training.fp16.init, 2 * training.fp16.maximum]
    for trial in training.trials:
        assert trial.overflow is trial.predicted_overflow
        assert trial.flushed == pytest.approx(trial.predicted, abs=0.005)
    assert [t.overflow for t in training.trials] == [False, False, True]


def test_errors_of_a_low_step_are_small_and_ordered(trained: Trained) -> None:
    assert trained.audit.training is not None
    errors = trained.audit.training.errors
    assert errors["fp16"] is not None and errors["bf16"] is not None
    assert 0 < errors["fp16"] < errors["bf16"] < 0.05


def test_batch_sizes_are_of_one_batch(trained: Trained) -> None:
    assert trained.audit.training is not None
    rows = trained.audit.training.batch_sizes
    assert [row.samples for row in rows] == [2, 4, 8]
    assert all(math.isfinite(error) for row in rows for error in row.error.values() if error is not None)


def test_the_document_holds_the_window_as_promised(trained: Trained, root) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(json.dumps(trained.audit.to_json(), allow_nan=False))
    schema = json.loads((root / "docs" / "plan.schema.json").read_text(encoding="utf-8"))
    assert [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(document)] == []
    assert trained.audit.training is not None and trained.audit.training.fp16 is not None
    fp16 = document["training"]["fp16"]
    assert {"min_loss_scale", "max_loss_scale", "init_scale", "flushed_share_unscaled", "closed_by"} <= set(fp16)
    assert fp16["max_loss_scale"] == trained.audit.training.fp16.maximum
    assert document["training"]["bf16"]["lost_updates_adam"]["0.001"] is not None


def test_two_audits_give_the_same_bytes() -> None:
    texts = []
    for _ in range(2):
        model, tokens, targets = made()
        audit = auditor.audit(
            model, (tokens, targets), mode="training", loss_fn=loss_fn, formats=("fp16",), strategies=("autocast",)
        )
        texts.append(json.dumps(audit.to_json()["training"]))
    assert texts[0] == texts[1]


def test_inference_has_no_training_entry() -> None:
    audit = auditor.audit(nn.Linear(4, 2), torch.ones(3, 4), formats=("bf16",), strategies=("autocast",))
    assert audit.training is None
    assert "training" not in audit.to_json()
