"""What a run with an operation low says, by the user's own measure too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.measure.rerun import PLAIN, Reruns, Yardstick, chooses_otherwise
from tests.support.brute_force import true_isolated
from tests.support.capturing import Function
from tests.support.subjects import capture_of, measurement_of, normal


def test_one_low_is_what_brute_force_says() -> None:
    measured = measurement_of(Function(lambda x: (x * 3.0).exp().sin()), normal(4, 3))
    reruns = Reruns(measured, "bf16", PLAIN)
    for name in measured.capture.nodes:
        error, flipped = reruns.together([name])
        assert error == pytest.approx(true_isolated(measured, name, "bf16"), rel=1e-5)
        assert not flipped


def test_what_raises_is_an_infinite_error() -> None:
    measured = measurement_of(Function(lambda x: (x * 3.0) @ x), torch.eye(2))
    assert Reruns(measured, "bf16", PLAIN).error("mul", torch.ones(3, 3)) == math.inf


@pytest.mark.parametrize(("value", "expected", "operations"), [(torch.inf, 1.0, 1), (0.5, 0.5, 3)])
def test_a_change_is_followed_until_something_absorbs_it(value: float, expected: float, operations: int) -> None:
    measured = measurement_of(Function(lambda x: (x * 3).clamp(max=1.0).exp().sin()), torch.tensor([5.0]))
    reruns, was, now = Reruns(measured, "bf16", PLAIN), math.sin(math.e), math.sin(math.exp(expected))
    assert reruns.error("mul", torch.tensor([value])) == pytest.approx(abs(now / was - 1), rel=1e-5)
    assert reruns.spent == operations / 4


@pytest.mark.parametrize(
    ("function", "now", "expected"),
    [
        (lambda x: x.argmax(-1), [[0.9, 0.2]], True),
        (lambda x: x.argmax(-1), [[0.3, 0.9]], False),
        (lambda x: x > 0.5, [[0.2, 0.4]], True),
        (lambda x: x.topk(1), [[0.9, 0.2]], True),
        (lambda x: x.round(), [[0.6, 0.9]], True),
        (lambda x: x.sign(), [[-0.1, 0.9]], True),
        (lambda x: x.isfinite(), [[torch.inf, 0.9]], False),
        (lambda x: x.exp(), [[0.9, 0.2]], False),
    ],
)
def test_what_is_another_choice(function: Callable[..., Any], now: list[list[float]], expected: bool) -> None:
    x = torch.tensor([[0.2, 0.9]])
    graph = capture_of(Function(lambda x: (function(x), x * 2.0)), x).graph_module.graph
    node = next(node for node in graph.nodes if node.op == "call_function")
    assert chooses_otherwise(node, function(torch.tensor(now)), function(x)) == expected


def test_the_users_own_measure_is_asked_and_its_unit_taken_off() -> None:
    def largest(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
        return max(float((r - c).abs().max()) for r, c in zip(reference, low, strict=True))

    measured = measurement_of(Function(lambda x: (x * 3.0) + 1.0), torch.tensor([[1.0, 2.0]]))
    yardstick = Yardstick(0.5, largest, unit=10.0)
    assert yardstick.limit == 0.05
    off = Reruns(measured, "bf16", yardstick).error("mul", torch.tensor([[3.0, 6.5]]))
    assert off == pytest.approx(0.5 / 10.0)
    assert yardstick([torch.ones(2)], [torch.tensor([1.0, torch.inf])]) == math.inf
