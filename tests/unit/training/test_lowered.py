"""Which gradients are low under autocast, on a model of three operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.policy import plain
from auditor.numerics.histogram import magnitudes_of
from auditor.records import Capture
from auditor.training.stage import low_by_module, low_names, module_gradients, parameter_gradients
from tests.support.subjects import capture_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(-1) * self.scale


@pytest.fixture(scope="module")
def captured() -> Capture:
    return capture_of(Net(), torch.ones(3, 2))


@pytest.fixture(scope="module")
def low(captured: Capture) -> frozenset[str]:
    return low_names(captured, "fp16", plain("fp16"))


def name_of(captured: Capture, fqn: str) -> str:
    (name,) = (place.name for place in captured.placeholders if place.fqn == fqn)
    return name


def test_results_and_what_is_lowered_for_a_reader(captured: Capture, low: frozenset[str]) -> None:
    # The layer's weight and its input are lowered for it; the softmax and the product with FP32 run wide.
    (x,) = (place.name for place in captured.placeholders if place.kind == "input")
    assert low == {"linear", name_of(captured, "layer.weight"), x}


def test_gradients_by_module(captured: Capture, low: frozenset[str]) -> None:
    weight, scale = name_of(captured, "layer.weight"), name_of(captured, "scale")
    spreads = {
        "linear": magnitudes_of(torch.tensor([4.0, 1.0])),
        "softmax": magnitudes_of(torch.tensor([16.0])),
        weight: magnitudes_of(torch.tensor([2.0, 2.0**-30])),
        scale: magnitudes_of(torch.tensor([32.0])),
    }
    found = low_by_module(captured, spreads, low)
    assert list(found) == ["layer"]
    # 2^-30 beside 2 is beyond the 24 bits of FP32's significand
    assert found["layer"].exponents == {0: 1, 1: 1, 2: 1}
    rows = {row.module: row for row in module_gradients(captured, spreads, low)}
    assert list(rows) == ["layer", ""]
    assert rows["layer"].low is not None
    assert (rows["layer"].activations.max_abs, rows["layer"].low.max_abs) == (4.0, 4.0)
    assert (rows[""].activations.max_abs, rows[""].low) == (16.0, None)


def test_gradients_of_parameters(captured: Capture, low: frozenset[str]) -> None:
    spread = magnitudes_of(torch.ones(1))
    spreads = {name_of(captured, "layer.weight"): spread, name_of(captured, "scale"): spread}
    weights = {"layer.weight": (spread, {0: 1}), "scale": (spread, {})}
    found = {row.name: row for row in parameter_gradients(captured, spreads, weights, low)}
    assert {name: (row.module, row.low) for name, row in found.items()} == {
        "layer.weight": ("layer", True),
        "scale": ("", False),
    }
    assert found["layer.weight"].ratios == {0: 1}
    assert parameter_gradients(captured, {}, weights, low) == ()  # frozen: no gradient, no row
