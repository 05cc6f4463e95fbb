"""What operations take of criteria, against brute force: one of them low at a time, held to definitions written out here."""

import math
import statistics
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.criteria import criteria_of
from auditor.criteria.measure import criteria_for
from auditor.isolation.outputs import tensor_outputs
from auditor.isolation.run_model import run_model
from auditor.measure.attribute import first_order
from auditor.measure.measure import Measurement
from auditor.measure.probes import PARTS, SHORT, inner_products
from auditor.measure.rerun import OutputMetric
from auditor.measure.uncertain import measure_uncertain
from auditor.numerics.formats import format_of
from auditor.records import Contribution
from tests.support.brute_force import OneLow, spearman
from tests.support.replaying import Model
from tests.support.subjects import measurement_of, normal, seeded
from tests.support.thinned import thinned

Share = Callable[[Tensor, Tensor], float]


class Tokens(nn.Module):
    """Two blocks of attention and a perceptron."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 32), head
        self.qkv = nn.ModuleList([nn.Linear(32, 96) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(32, 64) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(64, 32) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(5)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).chunk(3, -1)
            x = x + (q @ k.transpose(-1, -2) / 32**0.5).softmax(-1) @ v
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[4](x))


class Pixels(nn.Module):
    """Convolutions and norms over an image, and a row for every place in it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.third, self.fourth = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.group, self.batch, self.head = nn.GroupNorm(4, 32), nn.BatchNorm2d(32), head

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.group(self.second(F.relu(self.first(x)))))
        x = x + F.silu(self.batch(self.third(x)))
        return self.head((2 * torch.tanh(self.fourth(x))).flatten(2).transpose(1, 2))


class Gates(nn.Module):
    """Four gated layers beside a residual."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 32), head
        self.layers = nn.ModuleList([nn.Linear(32, 64) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            value, gate = layer(norm(x)).chunk(2, -1)
            x = x + value * torch.sigmoid(gate)
        return self.head(x)


def kl(r: Tensor, c: Tensor) -> float:
    p, q = r.softmax(-1), c.softmax(-1)
    return math.sqrt(max(float((p * (p.log() - q.log())).sum(-1).mean()), 0.0) / 0.001)


SENTENCES = torch.randint(0, 60, (8, 16), generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(8, 24, 12, generator=torch.Generator().manual_seed(3))


def margins(r: Tensor, c: Tensor, allowed: float = 0.1, k: int = 1) -> float:
    """The change of the margins of the k-th and the next entry, over that at which a share `allowed` is expected to flip.

    Margins near that change count. Where the candidates lie on BF16's or FP16's grid, they may be equal: a variance of a sixth of its spacing squared on top.
    """
    flipping = change_of_rows(r, allowed, k)
    a, b = r.topk(k + 1, -1).indices[..., k - 1 :].unbind(-1)
    first, second = (torch.stack([x.gather(-1, i[..., None])[..., 0] for i in (a, b)]) for x in (r, c))
    square = (second[0] - second[1] - first[0] + first[1]).square()
    grids = [
        bits for low, bits in ((torch.bfloat16, 7), (torch.float16, 10)) if torch.equal(second, second.to(low).double())
    ]
    if grids:
        square = square + (2.0 ** (second[0].abs().log2().floor() - grids[0])).square() / 6
    return rms_near(square, first[0] - first[1], flipping) / flipping


def rms_near(square: Tensor, margin: Tensor, flipping: float) -> float:
    """The root of the mean of squares, each weighed by how near its margin is to what flips decisions."""
    weight = torch.exp(-((margin / flipping) ** 2) / 2)
    return float(((weight * square).sum() / weight.sum()).sqrt())


def threshold(r: Tensor, c: Tensor) -> float:
    """The change of all entries, over that at which one in a hundred is expected to cross a half."""
    return float((c - r).square().mean().sqrt()) / change_for((r - 0.5).abs(), 0.01)


@cache
def change_of_rows(r: Tensor, allowed: float, k: int) -> float:
    """The normal error of the difference of any two entries of a row at which a share of the k largest is replaced: drawn."""
    largest = r.flatten(0, -2).topk(k + 9, -1).values
    drawn = torch.randn(4000, *largest.shape, generator=torch.Generator().manual_seed(9))
    low, high = 1e-4, 10.0
    for _ in range(16):
        middle = (low * high) ** 0.5
        kept = (largest + middle / 2**0.5 * drawn).topk(k, -1).indices < k
        low, high = (middle, high) if 1 - float(kept.double().mean()) <= allowed else (low, middle)
    return low


def change_for(size: Tensor, allowed: float) -> float:
    """The normal error of all margins at which a share `allowed` is expected to flip."""
    steps = [1e-4 * 1.01**i for i in range(2000)]
    return next(s for s in steps if torch.erfc(size / s / 2**0.5).mean() / 2 >= allowed)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Share]] = {
    "kl <= 0.001": (lambda: Gates(nn.Linear(32, 40)), ROWS, kl),
    "max_abs <= 0.02": (lambda: Pixels(nn.Linear(32, 32)), IMAGES, lambda r, c: float((c - r).abs().max()) / 0.02),
    "top1 >= 0.9": (lambda: Gates(nn.Linear(32, 40)), ROWS, margins),
    "top1 >= 0.98": (lambda: Tokens(nn.Linear(32, 60)), SENTENCES, lambda r, c: margins(r, c, 0.02)),
    "topk(3) >= 0.95": (lambda: Pixels(nn.Linear(32, 20)), IMAGES, lambda r, c: margins(r, c, 0.05, 3)),
    "flips(0.5) <= 0.01": (lambda: Pixels(nn.Sequential(nn.Linear(32, 1), nn.Sigmoid())), IMAGES, threshold),
    "psnr >= 40": (
        lambda: Tokens(nn.Sequential(nn.Linear(32, 16), nn.Sigmoid())),
        SENTENCES,
        lambda r, c: 100 * float((c - r).square().mean().sqrt() / (r.max() - r.min())),
    ),
}
"""{criterion: a model, its input, and the share of it that two outputs take, by definition}."""


class Case:
    """A model under one criterion: what was found of its operations, and what is true."""

    def __init__(self, text: str) -> None:
        make, x, self.share = CASES[text]
        torch.manual_seed(1)
        model = make().eval()
        held = criteria_for(criteria_of(f"output: {text}"), 0.01, run_model(model, ((x,), {})))
        self.measured: Measurement = measurement_of(model, x)
        first = first_order(self.measured, 0, OutputMetric(1.0, held))
        self.found, _ = measure_uncertain(self.measured, first, OutputMetric(1.0, held))
        self.answers, self.predicted = first.answers, first.contributions

    def compared(self, fmt: str) -> list[tuple[Contribution, Contribution, float]]:
        """Of every operation that moves the output what was found, and predicted, and how much it takes."""
        reference = self.measured.outputs[0].detach().double()
        flat = [x.detach() if isinstance(x, Tensor) else x for x in self.measured.flat_inputs]
        found = []
        for name, node in self.measured.capture.nodes.items():
            with torch.no_grad():
                low = tensor_outputs(OneLow(self.measured.capture.graph_module, name, fmt).run(*flat))[0].double()
            if node.floating and float((low - reference).norm() / reference.norm()) > 1e-7:
                found.append((self.found[name][fmt], self.predicted[name][fmt], self.share(reference, low)))
        return found


def fits(pairs: list[tuple[float, float]]) -> None:
    ratios = [found / true for found, true in pairs]
    assert len(pairs) >= 9
    assert spearman(*map(list, zip(*pairs, strict=True))) >= 0.95
    assert 0.9 <= statistics.median(ratios) <= 1.1


@pytest.mark.parametrize("text", thinned(CASES))
def test_against_brute_force(text: str) -> None:
    """What is predicted fits brute force, what was run alone is equal to it, and what is safe with others is safe alone."""
    case = Case(text)
    compared = case.compared("bf16")
    alone = [(found.isolated, true) for found, _, true in compared if found.decided_by == "re-run"]
    assert all(true / 1.6 <= found <= 1.6 * true for found, true in alone)  # the largest error is one rounding
    assert sum(found == pytest.approx(true, rel=1e-2) for found, true in alone) >= 0.8 * len(alone)
    grouped = [(found.isolated, true) for found, _, true in compared if found.decided_by == "group"]
    assert all(true <= 1.05 * max(found, 0.25) for found, true in grouped)
    if case.answers:
        fits([(predicted.isolated, true) for _, predicted, true in compared])
    assert not any(found.decided_by == "not-run" for found, _, _ in compared)


def pair() -> nn.Module:
    """Two outputs of which errors on the way to one do not reach the other."""
    parts = {"shared": nn.Linear(8, 16), "one": nn.Linear(16, 16), "other": nn.Linear(16, 16)}
    return Model(lambda m, x: (m.one(y := torch.tanh(m.shared(x))).exp(), torch.sigmoid(m.other(y))), **parts)


def test_of_several_criteria_that_one_counts_of_which_most_is_taken() -> None:
    model, x = seeded(pair), normal(16, 8)
    measured = measurement_of(model, x)
    reference = run_model(model, ((x,), {}))

    def under(*asked: str) -> dict[str, Contribution]:
        held = criteria_for(criteria_of(asked), 1e6, reference)
        return {
            name: found["bf16"]
            for name, found in first_order(measurement_of(model, x), 0, OutputMetric(1.0, held)).contributions.items()
        }

    first, second = "0: rel_l2 <= 0.02", "1: psnr >= 45"
    alone, other, both = under(first), under(second), under(first, second)
    told = set()
    for name in measured.capture.nodes:
        larger = alone[name] if alone[name].isolated > other[name].isolated else other[name]
        assert both[name].isolated == pytest.approx(larger.isolated)
        assert both[name].own == pytest.approx(max(alone[name].own, other[name].own))
        assert both[name].criterion == (first if larger is alone[name] else second)
        told.add(both[name].criterion)
    assert told == {first, second}


# Inner products by samples and parts, against the loop that defines them.


def by_hand(gradient: Tensor, error: Tensor, samples: int) -> list[list[float]]:
    """Per sample, PARTS runs of equal length, the last one longer by what is left over; entries where runs are short."""
    rows = zip(gradient.double().reshape(samples, -1), error.double().reshape(samples, -1), strict=True)
    found = []
    for g, e in rows:
        width = len(g) // PARTS
        starts = range(len(g)) if width < SHORT else range(0, PARTS * width, width)
        ends = [*list(starts)[1:], len(g)]
        found.append([float(g[a:b] @ e[a:b]) for a, b in zip(starts, ends, strict=True)])
    return found


@pytest.mark.parametrize(
    ("shape", "samples"),
    [
        ((1,), 1),
        ((7,), 1),
        ((16,), 1),
        ((3, 5), 3),
        ((4, 33), 4),
        ((4, 33), 1),
        ((2, 70_001), 2),
        ((1, 16_384), 1),
        ((1, 16_383), 1),
    ],
)
def test_against_the_definition(shape: tuple[int, ...], samples: int) -> None:
    gradient, error = normal(*shape, seed=1), normal(*shape, seed=2)
    (found,) = inner_products(gradient, error, samples)
    assert torch.allclose(
        found.double(), torch.tensor(by_hand(gradient, error, samples)).double(), rtol=1e-4, atol=1e-2
    )
    assert float(found.sum()) == pytest.approx(float((gradient.double() * error.double()).sum()), rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numbers", [50, 70_000])
def test_with_a_dtype_the_error_is_that_of_rounding(dtype: torch.dtype, numbers: int) -> None:
    gradient, value = normal(2, numbers, seed=1), normal(2, numbers, seed=2)
    rounding = value.to(dtype).float() - value
    assert torch.allclose(
        inner_products(gradient, value, 2, [format_of(dtype)])[0],
        inner_products(gradient, rounding, 2)[0],
        rtol=1e-4,
        atol=1e-6,
    )


def test_errors_in_bfloat16_are_read_as_they_are_and_stay_as_they_are() -> None:
    gradient, error = normal(4, 64, seed=1), normal(4, 64, seed=2).bfloat16()
    kept = error.clone()
    assert torch.equal(inner_products(gradient, error, 4)[0], inner_products(gradient, error.float(), 4)[0])
    assert torch.equal(error, kept)


@pytest.mark.parametrize("numbers", [40, 70_000])
def test_products_that_are_not_finite_count_as_nothing(numbers: int) -> None:
    gradient, error = torch.ones(1, numbers), torch.ones(1, numbers)
    gradient[0, 3], error[0, 5], error[0, -1] = torch.inf, torch.nan, -torch.inf
    assert float(inner_products(gradient, error, 1)[0].sum()) == numbers - 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [40, 70_000])
def test_what_is_in_the_format_already_has_no_error_and_stays_as_it_is(dtype: torch.dtype, numbers: int) -> None:
    gradient, value = normal(2, numbers, seed=1), normal(2, numbers, seed=2).to(dtype)
    kept = value.clone()
    assert not inner_products(gradient, value, 2, [format_of(dtype)])[0].any()
    assert torch.equal(value, kept)


def test_sums_that_are_finite_and_too_large_to_be_added_up_count_as_they_are() -> None:
    gradient, value = torch.full((1, 4096), 1e19), torch.full((1, 4096), 1e19)  # products of 1e38
    (found,) = inner_products(gradient, value, 1)
    assert torch.equal(found, gradient * value)
    gradient[0, 7] = torch.inf
    (found,) = inner_products(gradient, value, 1)
    assert found[0, 7] == 0
    assert found[0, 8] == gradient[0, 8] * value[0, 8]
