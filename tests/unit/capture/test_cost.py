"""What a recording costs grows with the operations, not with their square: counted, since clocks vary."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture.record import record
from tests.support.replaying import Model
from tests.support.subjects import normal

X = normal(4, 8)
FEW, MANY = 100, 400


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


def fresh_writes(count: int) -> Callable[..., Tensor]:
    """Every tensor at the address of one before it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(count):
            x = (x * 1.0001).add_(0.1).view(8, 4).clamp_(-9, 9).view(4, 8)
        return x

    return forward


def views_of_one(count: int) -> Callable[..., Tensor]:
    """Writes through a view of a view, over and over."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = x.clone()
        for _ in range(count):
            y = y.view(8, 4).contiguous().view(4, 8)
            y.add_(0.1)
        return y

    return forward


def rows_of_one(count: int) -> Callable[..., Tensor]:
    """Many living views of one tensor, each written and read."""

    def forward(self: Any, x: Tensor) -> Tensor:
        rows = torch.zeros(count, 8).unbind(0)
        for row in rows:
            row.add_(x[0])
        return rows[0] + rows[-1]

    return forward


def out_of_sight(count: int) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        for _ in range(count):
            y.data.add_(0.1)
        return y

    return forward


LOOPS = [chain, writes, fresh_writes, views_of_one, rows_of_one, out_of_sight]


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
            return record(model, ((X,), {}))

    return run


@pytest.mark.parametrize("loop", [*LOOPS[:2], *(pytest.param(loop, marks=pytest.mark.slow) for loop in LOOPS[2:])])
def test_work_and_memory_are_linear(loop: Callable[[int], Callable[..., Tensor]]) -> None:
    recording(loop, 10)()  # what is made once
    for measure in (calls_of, peak_of):
        few, many = measure(recording(loop, FEW)), measure(recording(loop, MANY))
        assert many <= 1.25 * MANY / FEW * few


def test_constants_are_kept_once_and_only_if_they_are_read() -> None:
    table = torch.ones(1000)

    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(20):
            assert table.exp().shape == (1000,)
            x = x + self.kept[:8]
        return x

    model = Model(forward)
    object.__setattr__(model, "kept", torch.ones(100))
    with torch.no_grad():
        recording, _ = record(model, ((X,), {}))
    assert [x.shape for x in recording.constants.values()] == [(100,)]


@pytest.mark.slow
def test_twenty_thousand_operations() -> None:
    for loop, count in ((chain, 20_000), (writes, 5_000)):
        with torch.no_grad():
            recording, (answer,) = record(Model(loop(count)), ((X,), {}))
            expected = Model(loop(count))(X)
        assert torch.equal(answer, expected)
        assert len(recording.marks) >= count
