"""Custom operators made of Python functions, and what a recording costs."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture.record import record
from tests.support.replaying import Model, operations, replayed
from tests.support.subjects import normal


@torch.library.custom_op("recording_test_python::scaled", mutates_args=())
def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


@torch.library.custom_op("recording_test_python::raised", mutates_args={"x"})
def raised(x: Tensor, by: Tensor) -> None:
    x += by


def test_operators_made_of_python_functions() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = scaled(x, factor=3.0)
        raised(y[0], by=x[1])
        raised(self.seen, by=y)
        return y, self.seen * 2

    model = Model(forward, seen=torch.ones(3, 4))
    found = operations(replayed(model, normal(3, 4)))
    assert (found.count("scaled"), found.count("raised")) == (1, 2)
    assert torch.equal(model.seen, torch.ones(3, 4))


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
