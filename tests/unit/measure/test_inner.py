"""Inner products by samples and parts, against the loop that defines them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.measure.probes import _SHORT as SHORT
from auditor.measure.probes import PARTS, inner_products
from auditor.numerics.formats import format_of
from tests.support.subjects import normal


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
    found = inner_products(gradient, error, samples)
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
        inner_products(gradient, value, 2, format_of(dtype)),
        inner_products(gradient, rounding, 2),
        rtol=1e-4,
        atol=1e-6,
    )


def test_errors_in_bfloat16_are_read_as_they_are_and_stay_as_they_are() -> None:
    gradient, error = normal(4, 64, seed=1), normal(4, 64, seed=2).bfloat16()
    kept = error.clone()
    assert torch.equal(inner_products(gradient, error, 4), inner_products(gradient, error.float(), 4))
    assert torch.equal(error, kept)


@pytest.mark.parametrize("numbers", [40, 70_000])
def test_products_that_are_not_finite_count_as_nothing(numbers: int) -> None:
    gradient, error = torch.ones(1, numbers), torch.ones(1, numbers)
    gradient[0, 3], error[0, 5], error[0, -1] = torch.inf, torch.nan, -torch.inf
    assert float(inner_products(gradient, error, 1).sum()) == numbers - 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [40, 70_000])
def test_what_is_in_the_format_already_has_no_error_and_stays_as_it_is(dtype: torch.dtype, numbers: int) -> None:
    gradient, value = normal(2, numbers, seed=1), normal(2, numbers, seed=2).to(dtype)
    kept = value.clone()
    assert not inner_products(gradient, value, 2, format_of(dtype)).any()
    assert torch.equal(value, kept)


def test_sums_that_are_finite_and_too_large_to_be_added_up_count_as_they_are() -> None:
    gradient, value = torch.full((1, 4096), 1e19), torch.full((1, 4096), 1e19)  # products of 1e38
    found = inner_products(gradient, value, 1)
    assert torch.equal(found, gradient * value)
    gradient[0, 7] = torch.inf
    found = inner_products(gradient, value, 1)
    assert found[0, 7] == 0
    assert found[0, 8] == gradient[0, 8] * value[0, 8]
