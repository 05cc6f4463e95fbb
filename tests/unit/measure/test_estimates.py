"""Estimates by backward passes: what a few of them tell, and what they leave behind."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor, nn

from auditor.measure import attribute
from auditor.measure.attribute import estimate
from tests.support.brute_force import true_isolated
from tests.support.capturing import Function
from tests.support.subjects import FORMATS, measurement_of, normal, only, seeded


def test_a_common_shift_of_all_parts_is_not_taken_for_noise() -> None:
    # Adding 2^-9 to numbers in [1, 2) and multiplying rounds all of them the same way: the sum feels all of it.
    model = Function(lambda x: (x * (1 + 2.0**-9)).sum(-1))
    measured = measurement_of(model, torch.full((8, 256), 1.0))
    mul = only(measured.capture, "mul").name
    found = estimate(measured, 0).contribution(mul, "bf16").isolated
    assert found == pytest.approx(true_isolated(measured, mul, "bf16"), rel=0.05)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 96)
        self.layers = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.LayerNorm(192), nn.Linear(192, 40))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None] / 7
        result: Tensor = self.layers(self.embed(tokens) + positions)
        return result.softmax(-1)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("enough", "passes"), [(0.0, 2), (1.0, 1)])
def test_the_few_passes_of_a_large_model_tell_what_eight_tell(
    enough: float, passes: int, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measurement_of(seeded(Net), tokens)
    nodes = [node for node, leaves in measured.live.items() if any(x.is_floating_point() for x in leaves)]
    reference = estimate(measurement_of(seeded(Net), tokens), 0)
    monkeypatch.setattr(attribute, "LIGHT", 0)
    monkeypatch.setattr(attribute, "ENOUGH", enough)
    few = estimate(measured, 1)
    weights = [p.name for p in measured.capture.placeholders if p.fqn and p.fqn.endswith("0.weight")]
    assert [len(few.passes[name]) for name in weights] == [1]
    values = [node for node in nodes if node in measured.capture.nodes]
    assert {len(few.passes[node]) for node in values} == {passes}
    for fmt in FORMATS:
        pairs = [(few.contribution(node, fmt).cast, reference.contribution(node, fmt).cast) for node in nodes]
        ratios = sorted(a / b for a, b in pairs if b)
        assert len(ratios) > 10
        assert 0.8 < statistics.median(ratios) < 1.25
        assert ratios[1] > 0.5  # all but the extremes
        assert ratios[-2] < 2


@pytest.mark.parametrize(("samples", "passes"), [(1, 4), (2, 3), (3, 3), (4, 2)])
def test_a_large_model_gets_more_passes_the_fewer_its_samples(
    samples: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sum of two numbers per sample: one pass gives at most four squares, and those of one sample tell no scatter.
    monkeypatch.setattr(attribute, "LIGHT", 0)
    monkeypatch.setattr(attribute, "ENOUGH", 0.0)
    measured = measurement_of(Function(lambda x: (x * 3.0).sum(-1)), normal(samples, 2))
    product = only(measured.capture, "mul").name
    assert len(estimate(measured, 0).passes[product]) == passes


def test_a_pass_that_does_not_tell_how_it_scatters_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever would be enough: one square per pass says nothing of its scatter before the fourth pass.
    monkeypatch.setattr(attribute, "LIGHT", 0)
    monkeypatch.setattr(attribute, "ENOUGH", math.inf)
    measured = measurement_of(Function(lambda x: x * 3.0), torch.tensor([[1.1]]))
    found = estimate(measured, 0)
    assert len(found.passes[only(measured.capture, "mul").name]) == 4


def test_a_small_model_gets_all_passes() -> None:
    measured = measurement_of(Function(lambda x: x * 3.0), torch.tensor([[1.1]]))
    assert len(estimate(measured, 0).passes[only(measured.capture, "mul").name]) == attribute.MAX_PROBES


def test_no_gradient_is_left_behind(tokens: Tensor) -> None:
    measured = measurement_of(seeded(Net), tokens)
    estimate(measured, 0)
    leaves = [x for x in measured.flat_inputs if isinstance(x, Tensor)] + measured.anchors
    assert all(leaf.grad is None for leaf in leaves if leaf.is_leaf)


@pytest.mark.parametrize(("steps", "passes"), [(20, 8), (300, 4)])
def test_a_long_recurrence_has_few_passes_however_small_it_is(steps: int, passes: int) -> None:
    measured = measurement_of(nn.GRU(4, 4), torch.randn(steps, 2, 4, generator=torch.Generator().manual_seed(0)))
    found = estimate(measured, 0)
    reached = len(found.passes[only(measured.capture, "gru").name])
    assert reached == passes if passes == attribute.MAX_PROBES else reached <= passes
