"""Formulas are found however they are spelled, once each, and not where the author computes them in FP32."""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from tests.rules.examples import Side
from tests.support.capturing import Function, captured

Step = Callable[..., Any]
EPS = 1e-5

GAPS: tuple[Step, ...] = (
    lambda x: x,
    lambda x: x.to(x.dtype),
    lambda x: x.type_as(x),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
)
"""What may stand between two operations without changing a number."""
SQUARES: tuple[Step, ...] = (
    lambda x: x.pow(2),
    lambda x: x * x,
    lambda x: x**2.0,
    lambda x: x.square(),
    lambda x: torch.pow(x, 2.0),
)
MEANS: tuple[Step, ...] = (
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.sum(-1, keepdim=True) / x.shape[-1],
    lambda x: x.sum(-1, keepdim=True) * (1.0 / x.shape[-1]),
)
GUARDS: tuple[Step, ...] = (lambda v: v + EPS, lambda v: EPS + v, lambda v: v.clamp_min(EPS), lambda v: v)
BY_ROOT: tuple[Step, ...] = (
    lambda x, v: x * torch.rsqrt(v),
    lambda x, v: torch.rsqrt(v) * x,
    lambda x, v: x / v.sqrt(),
    lambda x, v: (1.0 / v.sqrt()) * x,
    lambda x, v: x * v.sqrt().reciprocal(),
    lambda x, v: x / v**0.5,
    lambda x, v: v**-0.5 * x,
)
SUMS: tuple[Step, ...] = (lambda x: x.sum(-1, keepdim=True), lambda x: torch.sum(x, dim=-1, keepdim=True))
SHIFTS: tuple[Step, ...] = (
    lambda x: x - x.amax(-1, keepdim=True),
    lambda x: x - x.max(-1, keepdim=True)[0],
    lambda x: torch.sub(x, x.max(dim=-1, keepdim=True).values),
)
RATIOS: tuple[Step, ...] = (
    lambda e, s: e / s,
    lambda e, s: torch.div(e, s),
    lambda e, s: e * (1.0 / s),
    lambda e, s: s.reciprocal() * e,
    lambda e, s: e * s.pow(-1),
)
SCALINGS: tuple[Step, ...] = (lambda s: s / 8.0, lambda s: s * 0.125, lambda s: 0.125 * s, lambda s: s.div(8.0))
PRODUCTS: tuple[Step, ...] = (
    lambda q, k: q @ k.transpose(-1, -2),
    lambda q, k: torch.matmul(q, k.mT),
    lambda q, k: torch.einsum("id,jd->ij", q, k),
    lambda q, k: torch.bmm(q[None], k.t()[None])[0],
)
MASKS: tuple[Step, ...] = (
    lambda s: s,
    lambda s: s + torch.zeros(s.shape[-1], dtype=s.dtype),
    lambda s: s.masked_fill(torch.zeros(s.shape[-1], dtype=torch.bool), float("-inf")),
)
WAVES: tuple[Step, ...] = (
    lambda x, a: x * a.cos() + x.flip(-1) * a.sin(),
    lambda x, a: a.sin() * x.flip(-1) + torch.cos(a) * x,
)
JOINS: tuple[Step, ...] = (
    lambda a: torch.cat([a.sin(), a.cos()], -1),
    lambda a: torch.stack([torch.cos(a), torch.sin(a)]),
    lambda a: torch.cat((a.cos()[:, None], a.sin()[:, None]), 1),
)
ANGLES: tuple[Step, ...] = (lambda p, f: p * f, lambda p, f: f * p, lambda p, f: torch.mul(p, f))


def rms_norm(x: Tensor, gap: Step, square: Step, mean: Step, guard: Step, scale: Step) -> Any:
    return scale(x, guard(gap(mean(gap(square(x))))))


def layer_norm(x: Tensor, gap: Step, square: Step, mean: Step, guard: Step, scale: Step) -> Any:
    centred = gap(x - mean(x))
    return scale(centred, guard(mean(gap(square(centred)))))


def layer_norm_centred_twice(x: Tensor, gap: Step, square: Step, mean: Step, guard: Step, scale: Step) -> Any:
    average = mean(x)
    return scale(x - average, guard(gap(mean(square(x - average)))))


def softmax(x: Tensor, gap: Step, shift: Step, total: Step, ratio: Step) -> Any:
    e = torch.exp(gap(shift(x)))
    return ratio(e, gap(total(e)))


def softmax_unshifted(x: Tensor, gap: Step, total: Step, ratio: Step) -> Any:
    return softmax(x, gap, lambda x: x * 1.0, total, ratio)


def log_softmax(x: Tensor, gap: Step, shift: Step, total: Step) -> Any:
    shifted = shift(x)
    return shifted - torch.log(total(torch.exp(gap(shifted))))


def log_softmax_from_the_logits(x: Tensor, gap: Step, total: Step) -> Any:
    top = x.amax(-1, keepdim=True)
    return x - (gap(total(torch.exp(x - top)).log()) + top)


def variance(x: Tensor, gap: Step, square: Step, mean: Step, other: Step) -> Any:
    return mean(gap(square(x))) - other(gap(mean(x)))


def variance_from_the_negative(x: Tensor, gap: Step, square: Step, mean: Step, other: Step) -> Any:
    return -other(mean(x)) + gap(mean(square(x)))


def length(x: Tensor, gap: Step, square: Step, total: Step, guard: Step) -> Any:
    return torch.sqrt(guard(gap(total(gap(square(x))))))


def attention(x: Tensor, gap: Step, product: Step, scaling: Step, mask: Step) -> Any:
    return torch.softmax(mask(gap(scaling(gap(product(x, x + 1.0))))), -1)


def distances(x: Tensor, gap: Step, square: Step, product: Step) -> Any:
    codes = x.tanh()
    return gap(square(x).sum(-1, keepdim=True)) + square(codes).sum(-1) - 2.0 * gap(product(x, codes))


def distances_one_by_one(x: Tensor, gap: Step, square: Step, product: Step) -> Any:
    codes = x.tanh()
    return square(x).sum(-1, keepdim=True) - gap(product(x, codes) * 2.0) + square(codes).sum(-1)


def distances_by_negative_factor(x: Tensor, gap: Step, square: Step, product: Step) -> Any:
    codes = x.tanh()
    return gap(product(x, codes) * -2.0) + (square(x).sum(-1, keepdim=True) + square(codes).sum(-1))


Formula = tuple[str, Step, tuple[tuple[Step, ...], ...]]

FORMULAS: Mapping[str, Formula] = {
    "rms_norm": ("NRM001", rms_norm, (GAPS, SQUARES, MEANS, GUARDS, BY_ROOT)),
    "layer_norm": ("NRM002", layer_norm, (GAPS, SQUARES, MEANS, GUARDS, BY_ROOT)),
    "layer_norm_centred_twice": ("NRM002", layer_norm_centred_twice, (GAPS, SQUARES, MEANS, GUARDS, BY_ROOT)),
    "softmax": ("SFT003", softmax, (GAPS, SHIFTS, SUMS, RATIOS)),
    "softmax_unshifted": ("SFT002", softmax_unshifted, (GAPS, SUMS, RATIOS)),
    "log_softmax": ("SFT007", log_softmax, (GAPS, SHIFTS, SUMS)),
    "log_softmax_from_the_logits": ("SFT007", log_softmax_from_the_logits, (GAPS, SUMS)),
    "log_softmax_unshifted": ("RED005", lambda x, gap, total: x - gap(total(gap(x).exp())).log(), (GAPS, SUMS)),
    "variance": ("RED004", variance, (GAPS, SQUARES, MEANS, SQUARES)),
    "variance_from_the_negative": ("RED004", variance_from_the_negative, (GAPS, SQUARES, MEANS, SQUARES)),
    "length": ("RED006", length, (GAPS, SQUARES, SUMS, GUARDS)),
    "attention": ("ATT001", attention, (GAPS, PRODUCTS, SCALINGS, MASKS)),
    "distances": ("RTE003", distances, (GAPS, SQUARES, PRODUCTS)),
    "distances_one_by_one": ("RTE003", distances_one_by_one, (GAPS, SQUARES, PRODUCTS)),
    "distances_by_negative_factor": ("RTE003", distances_by_negative_factor, (GAPS, SQUARES, PRODUCTS)),
    "rotary": ("POS001", lambda x, gap, angle, wave: wave(x, gap(angle(x * 1000.0, x.cosh()))), (GAPS, ANGLES, WAVES)),
    "sinusoidal": ("POS004", lambda x, gap, angle, join: join(gap(angle(x * 1000.0, x.cosh()))), (GAPS, ANGLES, JOINS)),
}
"""By name: the rule that must find it, the formula, and what it is mixed from."""


def spellings(name: str) -> Iterable[tuple[int, ...]]:
    """Every mixture, as the index of each part."""
    return itertools.product(*(range(len(parts)) for parts in FORMULAS[name][2]))


def spelled(name: str, mixture: tuple[int, ...]) -> Step:
    """The formula in one spelling."""
    _, formula, parts = FORMULAS[name]
    steps = [choices[index] for choices, index in zip(parts, mixture, strict=True)]
    return lambda x: formula(x, *steps)


RULES = tuple(rule for rule in load_rules() if rule.code in {code for code, _, _ in FORMULAS.values()})
X = torch.linspace(-1, 1, 16).reshape(4, 4)
SAMPLE = 3


def found(functions: dict[str, Step]) -> dict[str, list[str]]:
    """Codes that fire on each function, all of them captured side by side."""
    toy = captured(Side([(name, Function(function), 1) for name, function in functions.items()]), *[X] * len(functions))
    codes: dict[str, list[str]] = {name: [] for name in functions}
    for finding in classify(toy.capture, toy.facts, RULES):
        codes[finding.owner].append(finding.rule)
    return codes


def check(drawn: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Each spelling is found once, by the rule of its formula."""
    named = {"_".join([name, *map(str, mixture)]): (name, mixture) for name, mixture in drawn}
    expected = {key: [FORMULAS[name][0]] for key, (name, _) in named.items()}
    assert found({key: spelled(*drawn) for key, drawn in named.items()}) == expected


def test_some_spellings_of_every_formula() -> None:
    """A sample that stays the same; the slow test below draws many more."""
    chooser = random.Random(0)
    check((name, mixture) for name in FORMULAS for mixture in chooser.sample(list(spellings(name)), SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_many_spellings(name: str, data: st.DataObject) -> None:
    every = list(spellings(name))
    count = min(20, len(every))
    mixtures = data.draw(st.lists(st.sampled_from(every), min_size=count, max_size=count, unique=True))
    check((name, mixture) for mixture in mixtures)
