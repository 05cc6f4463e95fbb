"""Every way by which Python gets to know the dtype of a tensor is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.capture.paths import usable
from auditor.records import Subject
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


# Which other batches a recorded path is good for: their own run decides.


def branching(x: Tensor) -> Tensor:
    return x.exp() if float(x.sum()) > 0 else x.tanh()


def scaled(x: Tensor) -> Tensor:
    return x * x.abs().max().item()


def listed(x: Tensor) -> Tensor:
    return x + torch.tensor([float(len(row)) for row in x.tolist()])


def chosen(x: Tensor) -> Tensor:
    return x[x > 0] * 2


def held(x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add_(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0])


UP, HIGHER, DOWN = torch.ones(2, 2), torch.full((2, 2), 3.0), -torch.ones(2, 2)


@pytest.mark.parametrize(
    ("function", "fitting"),
    [
        (branching, [UP, HIGHER]),
        (scaled, [UP, DOWN]),  # 3 would be another factor
        (listed, [UP, HIGHER, DOWN]),
        (chosen, [UP, HIGHER]),
        (held, [UP, HIGHER]),
        (torch.exp, [UP, HIGHER, DOWN]),
    ],
)
def test_batches_on_the_path(function: object, fitting: list[Tensor]) -> None:
    model: nn.Module = Function(function).eval()
    batches = tuple(((x,), {}) for x in (UP, HIGHER, DOWN, torch.ones(3, 2)))
    subject = Subject(model, batches[:2], "toy", "toy.py", "toy", "toy", held_out=batches[2:])
    found = capture(subject)
    kept = usable(found, subject, batches)
    assert [batch[0][0] is x for batch, x in zip(kept, fitting, strict=True)] == [True] * len(fitting)
    assert found.method == ("run" if function is torch.exp else "path")


def test_a_branch_that_fails_is_another_path() -> None:
    def forward(x: Tensor) -> Tensor:
        if float(x.sum()) < 0:
            raise ValueError("not for these")
        return x.exp()

    batches = tuple(((x,), {}) for x in (UP, DOWN))
    subject = Subject(Function(forward).eval(), batches, "toy", "toy.py", "toy", "toy")
    assert usable(capture(subject), subject, batches) == [batches[0]]
