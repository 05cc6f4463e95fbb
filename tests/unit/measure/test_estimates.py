"""Estimates by backward passes, and what they are made of: signs, sums of parts, derivatives."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.measure import attribute
from auditor.measure.attribute import estimate
from auditor.measure.measure import AT_ONCE, working_set
from auditor.measure.probes import Sums, by_level, chance, signs
from auditor.measure.reference import run_with_gradients
from tests.support.brute_force import true_isolated
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import FORMATS, capture_of, effects_of, measurement_of, normal, only, seeded


def test_a_common_shift_of_all_parts_is_not_taken_for_noise() -> None:
    # Adding 2^-9 to numbers in [1, 2) and multiplying rounds all of them the same way: the sum feels all of it.
    model = Function(lambda x: (x * (1 + 2.0**-9)).sum(-1))
    measured = measurement_of(model, torch.full((8, 256), 1.0))
    mul = only(measured.capture, "mul").name
    found = estimate(measured, 0).contribution(mul, "bf16").isolated
    assert found == pytest.approx(true_isolated(measured, mul, "bf16"), rel=0.05)


def net() -> nn.Module:
    def forward(m: Any, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None] / 7
        return m.layers(m.embed(tokens) + positions).softmax(-1)

    layers = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.LayerNorm(192), nn.Linear(192, 40))
    return Model(forward, embed=nn.Embedding(32, 96), layers=layers)


@pytest.mark.parametrize(("enough", "passes"), [(0.0, 2), (1.0, 1)])
def test_the_few_passes_of_a_large_model_tell_what_eight_tell(
    enough: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))
    measured = measurement_of(seeded(net), tokens)
    nodes = [node for node in measured.values if node not in measured.discrete]
    reference = estimate(measurement_of(seeded(net), tokens), 0)
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
def test_few_samples_give_large_models_more_passes(samples: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("steps", "passes"), [(20, 8), (300, 4)])
def test_a_long_recurrence_has_few_passes_however_small_it_is(steps: int, passes: int) -> None:
    measured = measurement_of(nn.GRU(4, 4), torch.randn(steps, 2, 4, generator=torch.Generator().manual_seed(0)))
    found = estimate(measured, 0)
    reached = len(found.passes[only(measured.capture, "gru").name])
    assert reached == passes if passes == attribute.MAX_PROBES else reached <= passes


# Random signs, and what their inner products say, on linear maps whose answer is known by hand.


def test_signs_are_the_seeds_and_zero_where_nothing_can_move() -> None:
    x = torch.tensor([1.0, -math.inf, 2.0, math.nan] * 16)
    found, again = (signs(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(found, again)
    assert set(found[torch.isfinite(x)].tolist()) == {-1.0, 1.0}
    assert set(found[~torch.isfinite(x)].tolist()) == {0.0}


# Squares of parts scatter less than squares of the whole, and stand in for them where errors are independent.


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Quantiles of chi-squared, as scipy.stats gives them, at 1 in 2069 (3.3 standard deviations) and its complement.
    [(8, 0.704, 27.952), (16, 3.517, 41.407), (64, 33.097, 108.026), (512, 412.945, 624.234)],
)
def test_whatchance_explains(count: int, low: float, high: float) -> None:
    assert chance(count)[0] * count == pytest.approx(low, rel=0.15)
    assert chance(count)[1] * count == pytest.approx(high, rel=0.01)


def summed(inner: Tensor) -> Sums:
    sums = Sums()
    sums.add(*by_level([inner])[0])
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


# What autograd cannot follow: the reference runs all the same, and what stands before it is decided by a run.

aten = torch.ops.aten
CLASSES = torch.tensor([0, 2, 1, 2])


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).requires_grad_()


def is_in(x: Tensor, tensors: list[Tensor]) -> bool:
    return any(x is y for y in tensors)


def test_an_argument_without_a_derivative_is_left_out_and_the_others_are_not() -> None:
    x, weight = leaf(4, 3), leaf(3, seed=1).detach().abs().requires_grad_()
    result, lost = run_with_gradients(aten.cross_entropy_loss.default, (x, CLASSES, weight), {})
    assert is_in(weight, lost)
    assert not is_in(x, lost)
    result.backward()
    assert x.grad is not None
    assert weight.grad is None
    assert float(result.detach()) == pytest.approx(float(F.cross_entropy(x.detach(), CLASSES, weight.detach())))


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.floor_divide.default, (leaf(4, 3), leaf(4, 3, seed=1))),
        (aten.heaviside.default, (leaf(4, 3), leaf(3, seed=1))),
        (aten.bincount.default, (CLASSES, leaf(4))),
        (aten.igamma.default, (normal(5).abs().requires_grad_(), normal(5, seed=1).abs().requires_grad_())),
        (aten.special_bessel_j0.default, (leaf(5),)),
    ],
)
def test_operations_without_a_derivative(target: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    result, lost = run_with_gradients(target, args, {})
    assert not result.requires_grad
    assert [is_in(x, lost) for x in args] == [x.requires_grad for x in args]
    assert torch.equal(result, target(*(x.detach() for x in args)))


def test_other_refusals_are_the_operations_own() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        run_with_gradients(aten.add.Tensor, (leaf(3), leaf(4)), {})


POSITIVE = torch.tensor([1.0, 3.0, 0.5])
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor division": lambda x: (x * 1.1) // 0.0004,
    "weighted loss": lambda x: F.cross_entropy(x, CLASSES, (x[0] * 1.1).exp()) + x,
    "binary loss": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), pos_weight=(x[1] * 1.1).exp()) + x,
    "step": lambda x: torch.heaviside((x * 1.1).round(decimals=2), POSITIVE) + x,
    "gamma": lambda x: torch.special.gammainc((x * 1.1).abs() + 1, POSITIVE),
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_stands_before_them_is_run_again(name: str, fmt: str) -> None:
    measured = measurement_of(Function(FUNCTIONS[name]), normal(4, 3))
    product = only(measured.capture, "mul").name
    found = effects_of(measured)[product][fmt]
    assert found.decided_by in ("re-run", "group")
    assert found.isolated == pytest.approx(true_isolated(measured, product, fmt), rel=1e-4, abs=1e-9)
    assert found.isolated > 0 or name == "step"


# The operation that needs most memory by itself.


def test_it_is_the_one_that_reads_and_gives_most() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    assert working_set(capture_of(model, torch.randn(3, 8))) == AT_ONCE * 4 * (8 * 64 + 64 + 3 * 8 + 3 * 64)


def test_what_an_operation_reads_twice_counts_once() -> None:
    assert working_set(capture_of(Function(lambda x: x * x), torch.randn(10, 10))) == AT_ONCE * 4 * 200
