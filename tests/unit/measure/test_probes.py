"""Random signs, and what their inner products say, on linear maps whose answer is known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.measure.probes import Sums, probes, signs


def test_signs_are_the_seeds_and_zero_where_nothing_can_move() -> None:
    x = torch.tensor([1.0, -math.inf, 2.0, math.nan] * 16)
    found, again = (signs(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(found, again)
    assert set(found[torch.isfinite(x)].tolist()) == {-1.0, 1.0}
    assert set(found[~torch.isfinite(x)].tolist()) == {0.0}


def test_a_probe_sums_every_tensor_under_its_signs() -> None:
    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[3.0]])
    for probe in probes([a, b], 3, seed=0):
        expected = (probe.signs[0] * torch.tensor([1.0, 2.0])).sum() + probe.signs[1].item() * 3
        assert float(probe.total) == float(expected)
        (gradient,) = torch.autograd.grad(probe.total, [a])
        assert torch.equal(gradient, probe.signs[0])


def test_a_diagonal_map_is_known_from_one_pass() -> None:
    """y = 2 x, d = (3, 4, 0): <v, J d>^2 differs from pass to pass, its mean is ||J d||^2 = 100."""
    x, error = torch.ones(3, requires_grad=True), torch.tensor([3.0, 4.0, 0.0])
    sums = Sums()
    for probe in probes([2 * x], 512, seed=1):
        (gradient,) = torch.autograd.grad(probe.total, [x], retain_graph=True)
        sums.add([[float(gradient @ error) ** 2]] * 4, [1] * 4)
    assert sums.square() / 512 == pytest.approx(100, rel=0.1)  # (6 +- 8)^2: 196 or 4
    assert sums.scatter() == pytest.approx(96 / 100 / math.sqrt(512) / 2, rel=0.05)
