"""One run written down: what it answers, who runs its operations, what is marked beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.capture.intercept import Handler
from auditor.capture.record import record
from auditor.capture.regions import Region
from tests.support.capturing import Function


def names(recording: Any) -> list[str]:
    return [node.name for node in recording.graph.nodes if node.op == "call_function"]


def test_the_answer_and_the_operations_in_order() -> None:
    recording, (answer,) = record(Function(lambda x: x.exp() + 1.0), ((torch.zeros(2),), {}))
    assert answer.tolist() == [2.0, 2.0]
    assert names(recording) == ["exp", "add"]
    assert (recording.outputs, recording.reads) == (("add",), False)


def test_the_batch_is_copied() -> None:
    x = torch.ones(2)
    recording, (answer,) = record(Function(lambda x: x.mul_(3.0)), ((x,), {}))
    assert x.tolist() == [1.0, 1.0]
    assert answer.tolist() == [3.0, 3.0]
    assert names(recording) == ["mul"]
    assert recording.marks["mul"].in_place == "mul_"


def test_observers_see_every_operations_own_result() -> None:
    seen: dict[str, Tensor] = {}
    record(
        Function(lambda x: (x * 2.0).add_(1.0)),
        ((torch.ones(1),), {}),
        observe=lambda node, value: seen.update({node.name: value.clone()}),
    )
    assert (seen["mul"].item(), seen["add"].item()) == (2.0, 3.0)  # the first as it was before the write


class Doubling(Handler):
    """Hands on twice what an addition gave."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def whole(self, op: Any, args: Any, kwargs: Any, region: Region) -> Any:
        if op is not torch.ops.aten.add.Tensor:
            return op(*args, **kwargs)
        self.regions.append(region)
        return op(*args, **kwargs) * 2

    part = whole


def test_the_handler_runs_the_operations() -> None:
    handler = Doubling()
    _, (answer,) = record(Function(lambda x: x + 1.0), ((torch.ones(1),), {}), handler=handler)
    assert answer.item() == 4.0  # (1 + 1) * 2
    assert [(region.enabled, region.dtype) for region in handler.regions] == [(True, "float32")]


def test_regions_and_calls_are_marked() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.inner(x)
            return x.tanh()

    recording, _ = record(Net(), ((torch.ones(1, 2),), {}))
    linear, tanh = recording.marks["linear"], recording.marks["tanh"]
    assert linear.region is not None
    assert not linear.region.enabled
    assert tanh.region is None  # where the run itself is
    assert [call.path for call in linear.calls] != [call.path for call in tanh.calls]


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda x: x * 2 if float(x.sum()) > 0 else x, True),
        (lambda x: x[x > 0], True),  # as many entries as there are
        (lambda x: x * float(torch.tensor(2.0)), False),  # no input has a part in it
        (lambda x: x * x.shape[0], False),
    ],
)
def test_values_that_python_reads(function: Any, reads: bool) -> None:
    recording, _ = record(Function(function), ((torch.ones(3),), {}))
    assert recording.reads is reads


def test_the_graph_gives_the_answer_again() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.clone()
        y[1:] *= 3.0
        return y.relu()

    x = torch.tensor([-1.0, 2.0, 3.0])
    recording, (answer,) = record(Function(forward), ((x,), {}))
    values = [recording.constants.get(node.name, x) for node in recording.graph.nodes if node.op == "placeholder"]
    (replayed,) = fx.Interpreter(fx.GraphModule({}, recording.graph)).run(*values)
    assert answer.tolist() == replayed.tolist() == [0.0, 6.0, 9.0]
