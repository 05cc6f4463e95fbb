"""Error metrics, each answer worked out beside it."""

import math

import pytest
import torch
from torch import Tensor

from auditor.errors import MeasureError
from auditor.numerics.formats import FORMATS
from auditor.numerics.metrics import disagreement, output_error, relative_l2, sqnr_db
from tests.support.refusing import refused

FP16, BF16 = FORMATS["fp16"], FORMATS["bf16"]
INF, NAN = math.inf, math.nan


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (t(3, 4), t(3, 4), 0.0),
        (t(3, 4), t(3, 4.5), 0.1),  # 0.5 / 5
        (t(3, 4), t(0, 0), 1.0),
        (t(0, 0), t(0, 0), 0.0),
        (t(0, 0), t(0, 1e-30), INF),
        (torch.empty(0), torch.empty(0), 0.0),
        (t(1, 2), t(NAN, 2), INF),
        (t(1, 2), t(INF, 2), INF),
        (t(1, 2), t(1, -INF), INF),
        (t(-INF, 3, 4), t(-INF, 3, 4.5), 0.1),  # a mask: the infinity is equal, the rest is 0.5 / 5
        (t(-INF, 3, 4), t(INF, 3, 4), INF),
        (t(-INF, 3, 4), t(-65504, 3, 4), INF),
        (t(-INF, 3, 4), t(NAN, 3, 4), INF),
        (t(NAN, 3, 4), t(7, 3, 4.5), 0.1),  # no reference, no error
        (t(-INF, 3), t(-INF, NAN), INF),
        (t(-INF, -INF), t(-INF, -INF), 0.0),
    ],
)
def test_relative_l2(reference: Tensor, candidate: Tensor, expected: float) -> None:
    assert relative_l2(reference, candidate) == pytest.approx(expected, rel=1e-12)


def test_squares_that_float32_does_not_hold_are_summed_up_in_float64() -> None:
    # 1e25^2 = 1e50 overflows FP32; the error is 1e24 / 1e25 up to the rounding of the inputs
    assert relative_l2(t(1e25), t(1.1e25)) == pytest.approx(0.1, rel=1e-5)
    assert relative_l2(t(1e-25), t(1.1e-25)) == pytest.approx(0.1, rel=1e-5)
    # 1000.5 is a value of fp16 (spacing 0.5), and 0.5 / 1000 = 5e-4
    assert relative_l2(t(1000).half(), t(1000.5).half()) == pytest.approx(5e-4)


def test_relative_l2_of_complex_numbers() -> None:
    assert relative_l2(torch.tensor([3 + 4j]), torch.tensor([3 + 4.5j])) == pytest.approx(0.1)


@pytest.mark.parametrize("step", [1, 2])
def test_large_tensors_are_compared_in_runs(step: int) -> None:
    x = normal_of(3 * (1 << 17) + 5).view(-1, 1).expand(-1, step).contiguous()[:, ::step]
    y = x.half()
    expected = float((x.double() - y.double()).square().sum().sqrt() / x.double().square().sum().sqrt())
    assert relative_l2(x, y) == pytest.approx(expected, rel=1e-5)
    broken = y.clone()
    broken[-1] = math.inf
    assert relative_l2(x, broken) == math.inf
    both = x.clone()
    both[-1] = math.inf
    assert relative_l2(both, broken) == pytest.approx(relative_l2(x[:-1], y[:-1]), rel=1e-5)


def normal_of(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def test_several_outputs_are_one_vector() -> None:
    # ||(0, 0.5, 0)|| / ||(3, 4, 12)|| = 0.5 / 13
    assert output_error([t(3, 4), t(12)], [t(3, 4.5), t(12)]) == pytest.approx(0.5 / 13)
    assert output_error([], []) == 0.0


def test_discrete_outputs_count_by_the_share_that_differs() -> None:
    indices = torch.tensor([1, 2, 3, 4])
    flipped = torch.tensor([1, 2, 3, 5])
    assert output_error([t(3, 4), indices], [t(3, 4), flipped]) == 0.25
    assert output_error([t(3, 4), indices], [t(3, 9), flipped]) == 1.0  # 5 / 5 outweighs 0.25
    assert output_error([torch.tensor([True, False])], [torch.tensor([True, True])]) == 0.5
    assert disagreement(indices, flipped) == 0.25
    assert disagreement(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)) == 0.0


@pytest.mark.parametrize(
    ("reference", "candidate"), [([t(1, 2)], [t(1)]), ([t(1)], []), ([t(1, 2)], [t(1, 2).reshape(1, 2)])]
)
def test_shapes_must_agree(reference: list[Tensor], candidate: list[Tensor]) -> None:
    with refused(MeasureError, "shape-mismatch"):
        output_error(reference, candidate)


def test_decibels() -> None:
    assert sqnr_db(0.1) == pytest.approx(20.0)
    assert sqnr_db(10.0) == pytest.approx(-20.0)
    assert sqnr_db(0.0) == INF
    assert sqnr_db(INF) == -INF
    assert sqnr_db(NAN) == -INF
