"""Quantised models and those on the way there: their float part is audited, what computes with integers stays."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

from tests.any_model.holding import Net, around, drawn, held
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def engine() -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = next(e for e in torch.backends.quantized.supported_engines if e != "none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.backends.quantized.engine = before


def stubs() -> nn.Module:
    """A quantized layer between two stubs, and one in FP32 after them."""
    ends = {"enter": quantization.QuantStub(), "leave": quantization.DeQuantStub()}
    layers = {"first": nn.Linear(16, 32), "act": nn.ReLU(), "last": nn.Linear(32, 8)}
    return Model(lambda m, x: m.last(m.leave(m.act(m.first(m.enter(x))))), **ends, **layers)


def static(convert: bool = True, aware: bool = False) -> nn.Module:
    model: Any = stubs().train(aware)
    config = quantization.get_default_qat_qconfig if aware else quantization.get_default_qconfig
    model.qconfig = config(torch.backends.quantized.engine)
    model.last.qconfig = None
    model = (quantization.prepare_qat if aware else quantization.prepare)(model)
    model(torch.randn(8, 16))
    model.eval()
    return quantization.convert(model) if convert else model


@pytest.mark.parametrize("aware", [False, True], ids=["calibrated", "trained so"])
def test_the_float_part_of_a_quantized_model(aware: bool) -> None:
    audit = held(drawn(lambda: around(static(aware=aware)), 4, 16))
    reports = {report.node.owner.removeprefix("inner."): report for report in audit.nodes}
    words = {error.unsupported for error in reports["leave"].errors.values()}
    assert words == {"aten.dequantize.self computes with quantized integers"}
    assert all(error.local_error is not None for error in reports["last"].errors.values())
    assert audit.plans["autocast_fp16"].low_precision_flops == 1


@pytest.mark.parametrize("aware", [False, True], ids=["calibrated", "trained so"])
def test_on_the_way_to_a_quantized_model(aware: bool) -> None:
    held(drawn(lambda: static(convert=False, aware=aware), 4, 16), formats="fp16")


def test_layers_quantized_as_they_run() -> None:
    def make() -> nn.Module:
        return nn.Sequential(Net(), quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), {nn.Linear}))

    audit = held(drawn(make, 4, 16))
    (node,) = [report for report in audit.nodes if "dynamic" in report.node.op]
    assert all(error.unsupported for error in node.errors.values())
    assert audit.plans["autocast_bf16"].low_precision_flops > 0.5


def pruned(model: Net) -> None:
    prune.l1_unstructured(model.first, "weight", 0.3)
    prune.random_structured(model.last, "weight", 0.3, dim=0)


def normalized(model: Net) -> None:
    """With vectors that some training steps have turned."""
    utils.spectral_norm(model.first)
    for _ in range(5):
        model.train()(torch.randn(4, 16))


CHANGED: dict[str, Callable[[Net], Any]] = {
    "weight norm, old": lambda model: utils.weight_norm(model.first),
    "weight norm": lambda model: parametrizations.weight_norm(model.first),
    "spectral norm, old": normalized,
    "own": lambda model: parametrize.register_parametrization(model.first, "weight", Function(torch.tanh)),
    "pruned": pruned,
}


@pytest.mark.parametrize("name", thinned(CHANGED, 2))
def test_weights_that_are_computed(name: str) -> None:
    def make() -> nn.Module:
        model = Net()
        CHANGED[name](model)
        return model

    audit = held(drawn(make, 4, 16))
    assert any(plan.is_verified and plan.low_precision_flops > 0.5 for plan in audit.plans.values())
