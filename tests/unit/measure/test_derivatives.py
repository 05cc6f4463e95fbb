"""What autograd cannot follow: the reference runs all the same, and what stands before it is decided by a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.measure.reference import differentiated
from tests.support.brute_force import true_isolated
from tests.support.capturing import Function
from tests.support.subjects import FORMATS, effects_of, measurement_of, normal, only

aten = torch.ops.aten
CLASSES = torch.tensor([0, 2, 1, 2])


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).requires_grad_()


def is_in(x: Tensor, tensors: list[Tensor]) -> bool:
    return any(x is y for y in tensors)


def test_an_argument_without_a_derivative_is_left_out_and_the_others_are_not() -> None:
    x, weight = leaf(4, 3), leaf(3, seed=1).detach().abs().requires_grad_()
    result, lost = differentiated(aten.cross_entropy_loss.default, (x, CLASSES, weight), {})
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
    result, lost = differentiated(target, args, {})
    assert not result.requires_grad
    assert [is_in(x, lost) for x in args] == [x.requires_grad for x in args]
    assert torch.equal(result, target(*(x.detach() for x in args)))


def test_other_refusals_are_the_operations_own() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        differentiated(aten.add.Tensor, (leaf(3), leaf(4)), {})


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
