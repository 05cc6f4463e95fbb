"""Every way by which Python gets to know the dtype of a tensor is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.capturing import Function
from tests.support.subjects import capture_of, only

X = torch.tensor([[1.0, -1.0]])


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.finfo(x.dtype).resolution


ASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x + torch.finfo(x.dtype).resolution,
    "of a part": lambda x: x + torch.finfo(x[0].exp().dtype).resolution,
    "type": lambda x: x + (1e-3 if x.type() == "torch.HalfTensor" else 1e-6),
    "itemsize": lambda x: x + (1e-3 if x.itemsize == 2 else 1e-6),
    "element_size": lambda x: x + (1e-3 if x.element_size() == 2 else 1e-6),
    "in a function of autograd": lambda x: Asking.apply(x),
    "what it is with another": lambda x: x + torch.finfo(torch.result_type(x, 1.0)).resolution,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_number_that_follows_a_dtype_is_found(ask: Any) -> None:
    found = only(capture_of(Function(lambda x: ask(x).exp()), X), "add")
    assert found.literals["fp16"].arguments == {1: 1e-3}


def test_a_constant_in_the_dtype_of_another_tensor_is_found() -> None:
    found = capture_of(Function(lambda x: (x.new_tensor([0.1, 0.2]) + x + 1e-6).exp()), X)
    assert any(place.made_in.get("fp16") is torch.float16 for place in found.placeholders)


def test_a_constant_that_python_makes_in_a_dtype_it_looked_at_is_found() -> None:
    """No operation of the recording has the dtype, or a limit of it, among its arguments."""
    model = Function(lambda x: x + torch.tensor([0.1, 0.2], dtype=x.dtype))
    assert any(place.made_in.get("fp16") is torch.float16 for place in capture_of(model, X).placeholders)
