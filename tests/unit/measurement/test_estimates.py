"""Squares of parts scatter less than squares of the whole, and stand in for them where errors are independent."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor, nn

from auditor.measurement import estimates
from auditor.measurement.estimates import _by_level, _chance, _Sums, estimate
from tests.brute_force import true_isolated
from tests.capturing import Function
from tests.subjects import FORMATS, measurement_of, normal, only, seeded


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Quantiles of chi-squared, as scipy.stats gives them, at 1 in 2069 (3.3 standard deviations) and its complement.
    [(8, 0.704, 27.952), (16, 3.517, 41.407), (64, 33.097, 108.026), (512, 412.945, 624.234)],
)
def test_what_chance_explains(count: int, low: float, high: float) -> None:
    assert _chance(count)[0] * count == pytest.approx(low, rel=0.15)
    assert _chance(count)[1] * count == pytest.approx(high, rel=0.01)


def summed(inner: Tensor) -> _Sums:
    sums = _Sums()
    sums.add(*_by_level(inner))
    return sums


def by_hand(inner: Tensor, parts: int) -> float:
    """Squares of the sums of runs of equal length."""
    return float(inner.double().unflatten(1, (parts, -1)).sum(2).square().sum())


def test_independent_parts_add_up_in_squares() -> None:
    inner = normal(8, 4096)
    sums = summed(inner)
    assert sums.squares == pytest.approx([by_hand(inner, parts) for parts in (1024, 128, 16, 1)])
    assert sums.counts == [8 * 1024, 8 * 128, 8 * 16, 8]
    assert sums.square() == sums.squares[0]


@pytest.mark.parametrize("parts", [128, 16, 1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parts_that_pull_together_or_cancel_are_summed_first(parts: int, sign: float) -> None:
    # Runs of one and the same error each, or of one error and its opposite by turns; run and run are independent.
    errors, pattern = normal(64, parts, 1), torch.tensor([1.0, sign]).repeat(512 // parts)
    inner = (errors * pattern).reshape(64, 1024)
    assert summed(inner).square() == pytest.approx(by_hand(inner, parts), rel=1e-9, abs=1e-9)
    assert summed(inner).square() != pytest.approx(by_hand(inner, 1024), rel=0.5)


@pytest.mark.parametrize("given", [1, 3, 17, 1000, 1025])
def test_odd_numbers_of_parts(given: int) -> None:
    inner = normal(2, given)
    sums = summed(inner)
    assert sums.squares[-1] == pytest.approx(float(inner.double().sum(1).square().sum()))
    assert sums.counts[-1] == 2
    assert sums.counts[0] <= 2 * 1024


def test_the_scatter_is_the_standard_error_of_the_root() -> None:
    sums = summed(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    squares = [1.0, 4.0, 9.0, 16.0]
    # Of the mean of four: deviation / sqrt(4), relative to the mean, halved by the root.
    assert sums.scatter() == pytest.approx(statistics.stdev(squares) / 2 / statistics.mean(squares) / 2)
    assert math.isnan(summed(torch.ones(3, 5)).scatter())
    assert math.isnan(summed(torch.zeros(8, 5)).scatter())


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
    monkeypatch.setattr(estimates, "LIGHT", 0)
    monkeypatch.setattr(estimates, "ENOUGH", enough)
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


def test_no_gradient_is_left_behind(tokens: Tensor) -> None:
    measured = measurement_of(seeded(Net), tokens)
    estimate(measured, 0)
    leaves = [x for x in measured.flat_inputs if isinstance(x, Tensor)] + measured.anchors
    assert all(leaf.grad is None for leaf in leaves if leaf.is_leaf)


def test_more_samples_scatter_less() -> None:
    spread = []
    for samples in (1, 4, 64):
        low, high = _chance(samples)
        spread.append(math.log(max(high, 1e-9) / max(low, 1e-9)))
    assert spread == sorted(spread, reverse=True)
