"""Operations know which call of a function of torch they are part of, as a mode of torch would see it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.records import Capture
from tests.support.subjects import capture_of, normal


def functions(found: Capture) -> list[tuple[str, str | None]]:
    """(operation, function) in execution order."""
    return [(node.op.split(".")[1], node.function and node.function.path) for node in found.nodes.values()]


class Spelled(nn.Module):
    """One function in every spelling, and functions that call others."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.pow(2) + torch.pow(x, 2) + x**2 + 2**x + 1 / x
        y = F.normalize(y) @ y.T
        return F.layer_norm(y, (4,)).softmax(-1)


def test_functions_are_called_the_same_however_they_are_spelled() -> None:
    found = functions(capture_of(Spelled(), normal(4, 4).abs() + 1))
    assert [name for op, name in found if op == "pow"] == ["pow", "pow", "pow", "rpow"]
    assert {name for op, name in found if op in ("reciprocal", "div")} == {"rdiv", "normalize"}
    assert {("layer_norm", "layer_norm"), ("softmax", "softmax"), ("matmul", "matmul")} <= set(found)


def test_what_a_function_calls_is_part_of_its_call() -> None:
    nodes = capture_of(Spelled(), normal(4, 4)).nodes.values()
    parts = [node.function for node in nodes if node.function and node.function.path == "normalize"]
    assert len(parts) > 1
    assert len({call.key for call in parts}) == 1
    adds = [node.function for node in nodes if node.op.startswith("aten.add.")]
    assert len({call.key for call in adds if call}) == len(adds) == 4


class Writing(nn.Module):
    """Functions that write to what they are given."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        y.exp_()
        F.relu(y, inplace=True)
        torch.mul(y, y, out=torch.empty_like(y))
        y[0] = 0
        return y.sqrt()


def test_calls_in_place_are_no_function_that_could_be_kept() -> None:
    found = functions(capture_of(Writing(), normal(4)))
    kept = [(op, name) for op, name in found if name not in (None, "setitem")]
    assert kept == [("mul", "mul"), ("sqrt", "sqrt")]
    assert all(op == "select" for op, name in found if name == "setitem")  # where to write, not what


class Outer(nn.Module):
    """A layer, a module in TorchScript, and an operation called past torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scripted = torch.jit.script(nn.Sequential(nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.sigmoid.default(self.scripted(self.layer(x)))


def test_depth_is_that_of_the_module_and_what_no_mode_sees_has_no_function() -> None:
    nodes = capture_of(Outer(), normal(2, 4)).nodes
    assert {name: node.function and node.function.path for name, node in nodes.items()} == {
        "linear": "linear",
        "tanh": None,
        "sigmoid": None,
    }
    linear = nodes["linear"]
    assert linear.function.depth == len(linear.calls) == 2
