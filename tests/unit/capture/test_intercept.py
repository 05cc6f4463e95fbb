"""Whatever a run raises, everything that was put in place for it is gone afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from auditor.capture.intercept import Handler, intercept
from auditor.errors import CaptureError
from auditor.isolation import isolate
from tests.support.replaying import Model, linear, operations, replayed
from tests.support.subjects import capture_of, normal

X = normal(3, 4)


def raising(error: BaseException) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            self.layer(x)
            region = torch.autocast("cpu", dtype=torch.bfloat16)
            region.__enter__()  # and never left
            raise error

    return forward


class Stopped(BaseException):
    """As a KeyboardInterrupt, which pytest would take for its own."""


@pytest.mark.parametrize(
    "error", [ValueError("no such luck"), Stopped(), RuntimeError("does not require grad")], ids=repr
)
def test_models_that_raise(error: BaseException) -> None:
    model = Model(raising(error), layer=linear(4, 4))
    expected = CaptureError if isinstance(error, Exception) else Stopped
    with pytest.raises(expected):
        capture_of(model, X)
    assert not any(module._forward_hooks for module in model.modules())
    assert operations(replayed(linear(4, 4), X))  # and another run goes well


def test_gradients_are_taken_as_the_caller_has_them() -> None:
    """Without gradients first; with them only where the model asks for some of its own."""
    seen: list[bool] = []

    def watching(self: Any, x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return self.layer(x)

    capture_of(Model(watching, layer=linear(4, 4)), X)
    assert set(seen) == {False}

    def forces(self: Any, x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        x.requires_grad_()
        return torch.autograd.grad(self.layer(x).square().sum(), x)[0]

    seen.clear()
    capture_of(Model(forces, layer=linear(4, 4)), X)
    assert seen[:2] == [False, True]


class Doubling(TorchDispatchMode):
    """A mode of the model's own: a ReLU gives twice as much."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.ops.aten.relu.default else result


def written_with(self: Any, x: Tensor) -> Tensor:
    self.first.data.view(-1)[1:].mul_(2)
    torch.add(self.second.data, 1.0, out=self.second.data)
    torch.vmap(lambda row: row.add_(1.0))(self.third.data)
    with Doubling():
        return torch.relu(x) * self.first[0, 0] + self.second.sum() + self.third.sum()


@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_written_comes_back_and_modes_of_the_models_own_go_on(gradients: bool) -> None:
    model = Model(written_with, **{name: nn.Parameter(torch.ones(2, 2)) for name in ("first", "second", "third")})
    with isolate(model), torch.set_grad_enabled(gradients):
        expected = model(X)
    with isolate(model), torch.set_grad_enabled(gradients), intercept(Handler()):
        assert torch.equal(model(X), expected)
    assert all(torch.equal(x, torch.ones(2, 2)) for x in model.parameters())
