"""Magnitudes of small tensors, counted by hand."""

from __future__ import annotations

import math

import torch

from auditor.numerics.profile import range_of
from auditor.records import NodeRange


def test_a_tensor_worked_out_by_hand() -> None:
    span = range_of(torch.tensor([[0.0, -3.0, 0.75], [0.5, 2.0, 0.0]]))
    # |x|: 3 = 1.5 * 2^1, 0.75 = 1.5 * 2^-1, 0.5 = 2^-1, 2 = 2^1; two of six are zero
    assert span == NodeRange(max_abs=3.0, min_abs=0.5, zeros=1 - 4 / 6, exponents={-1: 2, 1: 2})


def test_powers_of_two_open_their_own_bin() -> None:
    assert range_of(torch.tensor([1.0, 1.9999999, 2.0])).exponents == {0: 2, 1: 1}


def test_non_finite_entries_are_left_out() -> None:
    span = range_of(torch.tensor([math.inf, -math.inf, math.nan, 4.0, 0.0]))
    assert span == NodeRange(max_abs=4.0, min_abs=4.0, zeros=0.5, exponents={2: 1})


def test_tensors_without_a_magnitude() -> None:
    assert range_of(torch.empty(0)) == NodeRange(0.0, 0.0, 0.0, {})
    assert range_of(torch.zeros(3)) == NodeRange(0.0, 0.0, 1.0, {})
    assert range_of(torch.tensor([math.nan, math.inf])) == NodeRange(0.0, 0.0, 0.0, {})


def test_extremes_of_fp32() -> None:
    span = range_of(torch.tensor([2.0**-149, -3.4028234663852886e38]))
    assert (span.min_abs, span.max_abs) == (2.0**-149, 3.4028234663852886e38)
    assert span.exponents == {-149: 1, 127: 1}


def test_a_tensor_inside_autograd_and_in_half() -> None:
    assert range_of(torch.tensor([2.0], requires_grad=True) * 3).max_abs == 6.0
    assert range_of(torch.tensor([65504.0], dtype=torch.float16)).exponents == {15: 1}
