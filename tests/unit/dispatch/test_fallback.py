"""Without torch's private parts: recording, imitation and whole audits by one public mode, and no training."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor import dispatch, imitated
from auditor.api import audit
from auditor.errors import CaptureError
from tests.replaying import Model, linear, operations, replayed
from tests.subjects import nodes_by_op, normal, only


class Small(nn.Module):
    """A convolution, attention, norms, and a region of the author's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer_norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        y = self.layer_norm(y + self.attention(y, y, y, need_weights=False)[0])
        with torch.autocast("cuda", enabled=False):
            y = y.softmax(-1)
        return self.head(y * 8).log_softmax(-1)


def small() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small().eval()


X = normal(2, 3, 6, 6)


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.PUBLIC, "1")
    assert not dispatch.sees_whole()


def test_this_torch_has_the_private_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.PUBLIC, raising=False)
    assert dispatch.sees_whole()


def test_a_torch_without_them_takes_the_public_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a private module is gone, and where one of its names is."""
    monkeypatch.delenv(dispatch.PUBLIC, raising=False)
    for broken in ("torch._subclasses.schema_check_mode", "torch._dispatch.python"):
        with monkeypatch.context() as patch:
            patch.setitem(importlib.sys.modules, broken, None)
            patch.delitem(importlib.sys.modules, "auditor.dispatch.intercept")
            patch.delattr(dispatch, "intercept")
            spec = importlib.util.spec_from_file_location("auditor.dispatch", dispatch.__file__)
            assert spec is not None and spec.loader is not None
            again = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(again)
            assert not again.sees_whole()


@pytest.mark.usefixtures("public")
def test_a_recording_replays_bit_for_bit() -> None:
    found = replayed(small(), X)
    assert {"convolution", "native_layer_norm", "addmm", "softmax"} <= set(operations(found))
    assert only(found, "convolution").owner == "conv"
    assert {node.owner for node in nodes_by_op(found, "addmm")} >= {"head.0", "head.2"}
    assert [node.name for node in nodes_by_op(found, "softmax") if node.region is not None]
    assert all(node.source for node in found.nodes.values())


@pytest.mark.usefixtures("public")
def test_writes_draws_and_choices_are_recorded() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[1:].mul_(2)
        y[y > 0] += 1
        return nn.functional.dropout(y[: int(x.shape[0] - 1)], 0.5, True) + torch.randn(4)

    replayed(Model(forward, layer=linear(4, 4)), normal(3, 4), method="path")
    replayed(
        Model(lambda self, x: x * float(x.sum()) + self.layer(x[x.sum(-1) < 9])[0], layer=linear(4, 4)),
        normal(3, 4),
        method="path",
    )
    replayed(nn.BatchNorm1d(4).train(), normal(3, 4))
    replayed(nn.GRU(4, 4), normal(5, 2, 4))


@pytest.mark.usefixtures("public")
def test_literals_and_protected_regions_show() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scores = self.layer(x).masked_fill(x > 0, torch.finfo(x.dtype).min)
        if torch.is_autocast_enabled():
            with torch.autocast("cpu", enabled=False):
                return scores.float().softmax(-1)
        return scores.softmax(-1)

    found = replayed(Model(forward, layer=linear(4, 4)), normal(3, 4))
    region = only(found, "softmax").region
    assert region is not None
    assert not region.enabled
    assert only(found, "masked_fill").literals["fp16"].arguments[2] == -65504.0


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_imitation_casts_as_autocast_does(dtype: torch.dtype) -> None:
    layer, x = linear(4, 4), normal(3, 4)
    with torch.no_grad(), imitated("cuda"), torch.autocast("cuda", dtype=dtype):
        assert layer(x).dtype is dtype
        assert layer(x).softmax(-1).dtype is torch.float32
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cpu") is dtype
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_enabled.__module__ != dispatch.regions.__name__


def test_an_audit_states_the_same_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.PUBLIC, raising=False)
    whole = audit(small(), (X,), device="cpu")
    monkeypatch.setenv(dispatch.PUBLIC, "1")
    parts = audit(small(), (X,), device="cpu")
    for name, plan in whole.plans.items():
        assert parts.plans[name].measured_error == pytest.approx(plan.measured_error, rel=0.02)
        assert parts.plans[name].verified == plan.verified
    for name, baseline in whole.baselines.items():
        assert parts.baselines[name].measured_error == pytest.approx(baseline.measured_error, rel=0.02)


@pytest.mark.usefixtures("public")
def test_training_is_refused_in_one_line() -> None:
    with pytest.raises(CaptureError, match="training audits need") as caught:
        audit(
            linear(4, 4), [(normal(3, 4), normal(3, 4))], device="cpu", mode="training", loss_fn=nn.functional.mse_loss
        )
    assert caught.value.slug == "training-unavailable"
