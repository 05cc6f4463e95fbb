"""Operations know which call of a function of torch they are part of, as a mode of torch would see it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from auditor.capture.builder import RecordedModule
from auditor.capture.capture import assemble
from auditor.capture.record import record
from auditor.records import Batch, Capture
from tests.support.capturing import Function
from tests.support.replaying import Model, assert_same
from tests.support.subjects import capture_of, normal


def functions(found: Capture) -> list[tuple[str, str | None]]:
    """(operation, function) in execution order."""
    return [(node.op.split(".")[1], node.function and node.function.path) for node in found.nodes.values()]


def spelled(x: Tensor) -> Tensor:
    """One function in every spelling, and functions that call others."""
    y = x.pow(2) + torch.pow(x, 2) + x**2 + 2**x + 1 / x
    y = F.normalize(y) @ y.T
    return F.layer_norm(y, (4,)).softmax(-1)


def test_functions_are_called_the_same_however_they_are_spelled() -> None:
    found = functions(capture_of(Function(spelled), normal(4, 4).abs() + 1))
    assert [name for op, name in found if op == "pow"] == ["pow", "pow", "pow", "rpow"]
    assert {name for op, name in found if op in ("reciprocal", "div")} == {"rdiv", "normalize"}
    assert {("layer_norm", "layer_norm"), ("softmax", "softmax"), ("matmul", "matmul")} <= set(found)


def test_what_a_function_calls_is_part_of_its_call() -> None:
    nodes = capture_of(Function(spelled), normal(4, 4)).nodes.values()
    parts = [node.function for node in nodes if node.function and node.function.path == "normalize"]
    assert len(parts) > 1
    assert len({call.key for call in parts}) == 1
    adds = [node.function for node in nodes if node.op.startswith("aten.add.")]
    assert len({call.key for call in adds if call}) == len(adds) == 4


def writing(x: Tensor) -> Tensor:
    """Functions that write to what they are given."""
    y = x * 2
    y += 1
    y.exp_()
    F.relu(y, inplace=True)
    torch.mul(y, y, out=torch.empty_like(y))
    y[0] = 0
    return y.sqrt()


def test_calls_in_place_are_no_function_that_could_be_kept() -> None:
    found = functions(capture_of(Function(writing), normal(4)))
    kept = [(op, name) for op, name in found if name not in (None, "setitem")]
    assert kept == [("mul", "mul"), ("sqrt", "sqrt")]
    assert all(op == "select" for op, name in found if name == "setitem")  # where to write, not what


def outer() -> nn.Module:
    """A layer, a module in TorchScript, and an operation called past torch's functions."""
    return Model(
        lambda m, x: torch.ops.aten.sigmoid.default(m.scripted(m.layer(x))),
        layer=nn.Linear(4, 4),
        scripted=torch.jit.script(nn.Sequential(nn.Tanh())),
    )


def test_depth_is_that_of_the_module_and_what_no_mode_sees_has_no_function() -> None:
    nodes = capture_of(outer(), normal(2, 4)).nodes
    assert {name: node.function and node.function.path for name, node in nodes.items()} == {
        "linear": "linear",
        "tanh": None,
        "sigmoid": None,
    }
    linear = nodes["linear"]
    assert linear.function.depth == len(linear.calls) == 2


# Random programs of views and writes: whatever shares memory with what, the replay is the run.

Step = tuple[str, int, int, int]

VIEWS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "select": lambda x, a, b: x.select(a % x.dim(), b % x.shape[a % x.dim()]) if x.dim() else x,
    "slice": lambda x, a, b: x[a % 2 :: 1 + b % 3] if x.dim() else x,
    "narrow": lambda x, a, b: x.narrow(a % x.dim(), 0, 1 + b % x.shape[a % x.dim()]) if x.dim() else x,
    "transpose": lambda x, a, b: x.transpose(a % x.dim(), b % x.dim()) if x.dim() else x,
    "permute": lambda x, a, b: x.permute([(i + a) % x.dim() for i in range(x.dim())]) if x.dim() else x,
    "flip by movedim": lambda x, a, b: x.movedim(0, -1) if x.dim() else x,
    "unsqueeze": lambda x, a, b: x.unsqueeze(a % (x.dim() + 1)) if x.dim() < 4 else x,
    "squeeze": lambda x, a, b: x.squeeze(),
    "view": lambda x, a, b: x.view(-1) if x.is_contiguous() else x,
    "reshape": lambda x, a, b: x.reshape(-1),
    "reshape in two": lambda x, a, b: x.reshape(2, -1) if x.numel() % 2 == 0 and x.numel() else x,
    "diagonal": lambda x, a, b: x.diagonal() if x.dim() > 1 else x,
    "chunk": lambda x, a, b: x.chunk(2)[-1] if x.dim() else x,
    "split": lambda x, a, b: x.split(1 + b % 2, a % x.dim())[0] if x.dim() else x,
    "unbind": lambda x, a, b: x.unbind(a % x.dim())[b % x.shape[a % x.dim()]] if x.dim() else x,
    "unfold": lambda x, a, b: x.unfold(0, 2, 2) if x.dim() and x.shape[0] > 1 and x.dim() < 4 else x,
    "detach": lambda x, a, b: x.detach(),
    "data": lambda x, a, b: x.data,
    "cast": lambda x, a, b: x.float(),
    "as_strided": lambda x, a, b: x.as_strided(x.shape[:1], x.stride()[:1]) if x.dim() else x,
}

WRITES: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "add": lambda x, y, a: x.add_(a),
    "mul": lambda x, y, a: x.mul_(0.5 + a % 3),
    "tanh": lambda x, y, a: x.tanh_(),
    "fill": lambda x, y, a: x.fill_(float(a)),
    "zero": lambda x, y, a: x.zero_(),
    "copy": lambda x, y, a: x.copy_(y.amax()),
    "add other": lambda x, y, a: x.add_(y.amin()),
    "same shape": lambda x, y, a: x.sub_(y.clone()) if x.shape == y.shape else x.neg_(),
    "mask": lambda x, y, a: x.masked_fill_(x > 0, 0.25),
    "clamp": lambda x, y, a: x.clamp_(-1, 1),
    "set first": lambda x, y, a: x.__setitem__(0, y.amax()) if x.dim() and x.shape[0] else None,
    "out": lambda x, y, a: torch.add(x.clone(), 1, out=x),
    "truth": lambda x, y, a: x.gt_(0.1),
}

STEPS = st.tuples(st.sampled_from([*VIEWS, *WRITES, "new"]), st.integers(0, 7), st.integers(0, 7), st.integers(0, 5))


def forward(self: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """Every step views, writes to or computes on one of the tensors there are; all of them are returned.

    Sums are left out: over memory that lies otherwise they add in another order.
    """
    tensors = [x, y, x * 2, self.buffer]
    for name, first, second, number in self.program:
        one, other = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if name in VIEWS:
            if one.numel():
                tensors.append(VIEWS[name](one, number, second))
        elif name in WRITES:
            WRITES[name](one, other, number)
        else:
            tensors.append(one.cos() + other.amax())
    return tensors


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=14))
def test_programs_replay(program: list[Step]) -> None:
    model = Model(forward, buffer=normal(3, 4, seed=2))
    object.__setattr__(model, "program", program)
    batch: Batch = ((normal(4, 6), normal(2, 3, 2, seed=1)), {})
    with torch.no_grad():
        before = model.buffer.clone()
        expected = [x.clone() for x in model(*(x.clone() for x in batch[0]))]
        model.buffer.copy_(before)
        recording, answer = record(model, batch)
        model.buffer.copy_(before)
        assert_same(answer, expected)
        flat = assemble(recording, model, batch).bind(model, batch)
        actual = fx.Interpreter(RecordedModule(model, recording.graph)).run(*flat)
    assert_same(list(actual), expected)
    assert all(torch.equal(x, y) for x, y in zip(batch[0], (normal(4, 6), normal(2, 3, 2, seed=1)), strict=True))
