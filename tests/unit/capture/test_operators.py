"""Custom operators: with and without a fake kernel or a formula for gradients, those that write, and those that draw."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture.record import record
from tests.support.replaying import Model, linear, operations, replayed
from tests.support.subjects import normal, only

X = normal(3, 4)


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    """A namespace of operators that is gone after the tests."""
    with torch.library._scoped_library("recording_test", "DEF") as library:
        _define(library)
        yield torch.ops.recording_test


def _write(x: Tensor, y: Tensor) -> None:
    x.copy_(y * 2)


def _define(library: Any) -> None:
    def kernel(schema: str, function: Callable[..., Any]) -> str:
        library.define(schema)
        name = schema.split("(")[0]
        library.impl(name, function, "CPU")
        return f"recording_test::{name}"

    kernel("bare(Tensor x, float scale) -> Tensor", lambda x, scale: x.exp() * scale)
    name = kernel("faked(Tensor x) -> Tensor", lambda x: x.tanh())
    torch.library.register_fake(name, torch.empty_like, lib=library)
    name = kernel("differentiable(Tensor x) -> Tensor", lambda x: x.square())
    torch.library.register_fake(name, torch.empty_like, lib=library)
    torch.library.register_autograd(
        name,
        lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        lib=library,
    )
    kernel("write(Tensor(a!) x, Tensor y) -> ()", _write)
    kernel(
        "write_and_return(Tensor(a!) x, *, Tensor(b!) out) -> Tensor", lambda x, out: (x.add_(1), out.copy_(x))[0].sum()
    )
    kernel("lists(Tensor[] xs) -> (Tensor, Tensor[])", lambda xs: (xs[0] + 1, [x * 2 for x in xs]))
    kernel("noise(Tensor x) -> Tensor", lambda x: x + torch.randn_like(x))
    kernel("number(Tensor x) -> float", lambda x: float(x.sum()))
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x.sin().cos(), "CompositeImplicitAutograd")


@pytest.mark.parametrize("name", ["faked", "differentiable", "composite"])
def test_operators_that_return(operators: Any, name: str) -> None:
    found = replayed(Model(lambda self, x: getattr(operators, name)(self.layer(x)).exp(), layer=linear(4, 4)), X)
    assert operations(found) == ["linear", name, "exp"]
    assert only(found, "exp").source


def test_the_formula_is_used_where_gradients_are_taken_in_forward(operators: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(operators.differentiable(x).sum(), x)[0]

    assert "mul" in operations(replayed(Model(forward), X))


def test_operators_that_write(operators: Any) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1
        operators.write(y[1], x[0])
        operators.write(x=self.seen, y=y)
        return y, self.seen * 2

    model = Model(forward, seen=torch.ones(3, 4))
    found = replayed(model, X)
    assert operations(found).count("write") == 2
    assert torch.equal(model.seen, torch.ones(3, 4))


def test_operators_that_write_by_keyword_and_return(operators: Any) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y, z = x * 1, torch.empty(3, 4)
        total = operators.write_and_return(y, out=z)
        return total, y, z

    assert "write_and_return" in operations(replayed(Model(forward), X))


def test_results_in_a_list_in_a_tuple(operators: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first, (second, third) = operators.lists([x, x.exp()])
        return first + second * third

    found = replayed(Model(forward), X)
    assert not any(placeholder.kind == "constant" for placeholder in found.placeholders)


@torch.library.custom_op("recording_test_python::scaled", mutates_args=())
def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


@torch.library.custom_op("recording_test_python::raised", mutates_args={"x"})
def raised(x: Tensor, by: Tensor) -> None:
    x += by


def test_operators_made_of_python_functions() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = scaled(x, factor=3.0)
        raised(y[0], by=x[1])
        return y

    assert {"scaled", "raised"} <= set(operations(replayed(Model(forward), X)))


# What a recording costs grows with the operations, not with their square: counted, since clocks vary.

ROW = normal(4, 8)
FEW, MANY = 25, 100


def chain(count: int) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(count // 2):
            x = x * 1.0001 + 0.1
        return x

    return forward


def writes(count: int) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.zeros(count, 8)
        for i in range(count):
            y[i] = x[i % 4]
        return y

    return forward


def calls_of(function: Callable[[], Any]) -> int:
    """How many functions written in Python were called."""
    count = 0

    def tell(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tell)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def peak_of(function: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def recording(loop: Callable[[int], Callable[..., Tensor]], count: int) -> Callable[[], Any]:
    model = Model(loop(count))

    def run() -> Any:
        with torch.no_grad():
            return record(model, ((ROW,), {}))

    return run


@pytest.mark.parametrize("loop", [chain, writes])
def test_work_and_memory_are_linear(loop: Callable[[int], Callable[..., Tensor]]) -> None:
    recording(loop, 10)()  # what is made once
    for measure in (calls_of, peak_of):
        few, many = measure(recording(loop, FEW)), measure(recording(loop, MANY))
        assert many <= 1.25 * MANY / FEW * few
