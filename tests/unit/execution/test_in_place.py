"""What the author wrote in place is left alone by autocast, and keeps the dtype of what it writes to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, plain
from auditor.execution.resolve import resolve
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.nodes import tensors_of
from auditor.records import Capture
from tests.support.subjects import capture_of, normal

Function = Callable[[Tensor, Tensor], Tensor]
INDEX = torch.tensor([0, 1, 1, 2])


class Low(nn.Module):
    """A function of a product, which autocast makes low, and of the FP32 input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.product, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.product(x), x)


def captured(function: Function) -> Capture:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return capture_of(Low(function), normal(4, 4))


def dtypes(capture: Capture) -> dict[str, torch.dtype]:
    """Dtype of every floating value when the graph is run under plain autocast in FP16."""
    found: dict[str, torch.dtype] = {}

    def observe(node: fx.Node, value: object) -> None:
        if node.op != "output" and (tensor := tensors_of(value)[0]).is_floating_point():
            found[node.name] = tensor.dtype

    how = Policy(capture, "autocast", plain("fp16"), "fp16")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Low(lambda y, _: y).eval()
    interpreter = Executor(capture.graph_module, how, observe)
    with torch.no_grad():
        interpreter.run(*capture.bind(model, ((normal(4, 4),), {})))
    return found


def last(capture: Capture) -> str:
    return capture.outputs[0]


def scattered(y: Tensor, x: Tensor) -> Tensor:
    return torch.zeros(4, 4).scatter_add(0, INDEX[:, None].expand(-1, 4), y)


def scattered_in_place(y: Tensor, x: Tensor) -> Tensor:
    sums = torch.zeros(4, 4)
    return sums.scatter_add_(0, INDEX[:, None].expand(-1, 4), y)


def assigned(y: Tensor, x: Tensor) -> Tensor:
    sums = torch.zeros(4, 4)
    sums[INDEX.flip(0)] = y
    return sums


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, x: y.exp(), torch.float32),  # on the list of what autocast raises
        (lambda y, x: y.exp_(), torch.float16),
        (lambda y, x: y.pow(2), torch.float32),
        (lambda y, x: y.pow_(2), torch.float16),
        (lambda y, x: y + x, torch.float32),  # promotes
        (lambda y, x: y.add_(x), torch.float16),
        (lambda y, x: x.clone().add_(y), torch.float32),
        (lambda y, x: y.relu_().mul_(x), torch.float16),
        (scattered, torch.float32),  # on the list of what autocast promotes
    ],
)
def test_the_dtype_of_a_result(function: Function, expected: torch.dtype) -> None:
    capture = captured(function)
    assert capture.method == "run"
    found = dtypes(capture)
    assert found[last(capture)] is expected
    how = Policy(capture, "autocast", plain("fp16"), "fp16")
    resolved = resolve(how).dtypes
    names = {"fp16": torch.float16, "fp32": torch.float32}
    assert {name: names[resolved[name]] for name in found if resolved[name]} == found


@pytest.mark.parametrize("function", [scattered_in_place, assigned])
def test_two_dtypes_are_refused_in_place(function: Function) -> None:
    capture = captured(function)
    assert capture.nodes[last(capture)].in_place
    with pytest.raises(UnsupportedInFormat, match="dtype"):
        dtypes(capture)


def test_only_what_was_written_in_place_is_marked() -> None:
    capture = captured(lambda y, x: y.exp_() + x.exp() + y[:, :2].mul_(2).sum())
    marked = [node.op for node in capture.nodes.values() if node.in_place]
    assert sorted(marked) == ["aten.exp.default", "aten.mul.Tensor"]
