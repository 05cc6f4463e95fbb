"""The line that wrote an operation, never torch's, and the call that led to it beside."""

import functools
import inspect
import linecache
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.capture.source import raised_at
from auditor.records import Node
from tests.support.replaying import replayed
from tests.support.subjects import normal, only

X = normal(2, 4)
HERE = Path(__file__).name


def helper(x: Tensor) -> Tensor:
    return x.exp()


def line_of(function: Any) -> int:
    return inspect.getsourcelines(function)[1]


def written_of(node: Node) -> tuple[str | None, str | None]:
    return node.source, node.called_from


def written(found: Any, op: str) -> tuple[str | None, str | None]:
    return written_of(only(found, op))


def library(monkeypatch: Any) -> ModuleType:
    """A module of an installed package: a function, a module with a helper of its own, and one that calls back."""
    packages = Path(next(p for p in sys.path if p.endswith("site-packages")))
    made = ModuleType("some_library")
    source = (
        "from torch import nn\n"
        "def block(x):\n"
        "    return x.cosh()\n"
        "class Block(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return block(x).sin()\n"
        "class Calls(nn.Module):\n"
        "    def forward(self, x, back):\n"
        "        return back(x)\n"
    )
    exec(compile(source, str(packages / "some_library.py"), "exec"), made.__dict__)
    return made


def test_a_librarys_line_with_the_users_beside_it(monkeypatch: Any) -> None:
    made = library(monkeypatch)
    found = replayed(made.Block(), X)
    assert written(found, "sin") == ("some_library.py:6", None)
    assert written(found, "cosh") == ("some_library.py:3", "some_library.py:6 in Block.forward")

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.calls = made.Block(), made.Calls()

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            y = y + made.block(y.tanh())
            return self.calls(y, helper)

    found, first = replayed(Own(), X), inspect.getsourcelines(Own.forward)[1]
    assert written(found, "sin") == ("some_library.py:6", f"{HERE}:{first + 1} in Own.forward")
    assert [written_of(node) for node in found.nodes.values() if "cosh" in node.op] == [
        ("some_library.py:3", f"{HERE}:{first + 1} in Own.forward"),
        ("some_library.py:3", f"{HERE}:{first + 2} in Own.forward"),
    ]
    assert written(found, "tanh") == (f"{HERE}:{first + 2}", None)
    assert written(found, "exp") == (f"{HERE}:{line_of(helper) + 1}", "some_library.py:9 in Calls.forward")


def apart(x: Tensor) -> Tensor:
    return x.exp() + helper("é" and x.sinh())


def test_operations_of_one_line_have_columns_of_their_own() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return apart(x).cos() * x.tanh()

    found = replayed(Own(), X)
    line, calling = (inspect.getsource(function).splitlines()[-1] for function in (apart, Own.forward))
    sinh, exp = only(found, "sinh"), next(node for node in found.nodes.values() if "exp" in node.op)
    assert {exp.source, sinh.source} == {f"{HERE}:{line_of(apart) + 1}"}
    assert (exp.column, sinh.column) == (line.index("x.exp") + 1, line.index("x.sinh") + 1)
    assert exp.caller_column == sinh.caller_column == calling.index("apart") + 1
    assert only(found, "tanh").column == calling.index("x.tanh") + 1


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) * 2

    return wrapper


@doubled
def decorated(x: Tensor) -> Tensor:
    return x.tan()


SCRIPTED = torch.jit.script(torch.nn.functional.softsign)


class Kinds(nn.Module):
    """Ways to come to an operation, one a line of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.power = functools.partial(torch.pow, exponent=2)
        self.rooted = functools.partial(self.root, shift=3.0)

    def root(self, x: Tensor, shift: float) -> Tensor:
        return (x.abs() + shift).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        x = decorated(x)
        x = torch.stack([row.sin() for row in x])
        x = sum(row.cos() for row in x) + x
        flat = lambda y: y.flatten()  # noqa: E731
        x = flat(x)
        x = self.power(x) + self.rooted(x)
        x = checkpoint(self.inner, x, use_reentrant=False)
        return SCRIPTED(x)

    def inner(self, x: Tensor) -> Tensor:
        return helper(x).sigmoid()


def test_ways_to_come_to_an_operation() -> None:
    found, forward = replayed(Kinds(), X), line_of(Kinds.forward)
    root, inner = line_of(Kinds.root), line_of(Kinds.inner)

    def called(line: int) -> str:
        return f"{HERE}:{forward + line} in Kinds.forward"

    def lines_of(op: str) -> set[tuple[str | None, str | None]]:
        return {written_of(node) for node in found.nodes.values() if node.op.startswith(f"aten.{op}.")}

    below = line_of(decorated)
    assert lines_of("tan") == {(f"{HERE}:{below + 2}", called(1))}
    assert lines_of("mul") == {(f"{HERE}:{line_of(doubled) + 3}", called(1))}
    assert lines_of("sin") == {(f"{HERE}:{forward + 2}", None)}
    assert lines_of("cos") == {(f"{HERE}:{forward + 3}", None)}
    assert lines_of("flatten") == {(f"{HERE}:{forward + 4}", called(5))}
    assert lines_of("pow") == {(f"{HERE}:{forward + 6}", None)}
    assert lines_of("sqrt") == {(f"{HERE}:{root + 1}", called(6))}
    assert lines_of("exp") == {(f"{HERE}:{line_of(helper) + 1}", called(7))}
    assert lines_of("sigmoid") == {(f"{HERE}:{inner + 1}", called(7))}
    assert lines_of("div") == {(f"{HERE}:{forward + 8}", None)}  # TorchScript has no frames of its own


def test_a_cell_of_a_notebook() -> None:
    made, source = ModuleType("typed_in"), "def forward(self, x):\n    return x.sinh()\n"
    name = "<ipython-input-7-4f2a>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), made.__dict__)
    Cell = type("Cell", (nn.Module,), {"forward": made.forward})
    node = only(replayed(Cell(), X), "sinh")
    assert (node.source, node.code) == (f"{name}:2", "return x.sinh()")


class Hyperbolic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sinh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_the_forward_of_an_autograd_function_is_a_helper() -> None:
    class Net(nn.Module):
        @property
        def shift(self) -> Tensor:
            return torch.ones(4).cosh()

        def forward(self, x: Tensor) -> Tensor:
            return Hyperbolic.apply(x) + self.shift

    found, beside = replayed(Net(), X), f"{HERE}:{line_of(Net.forward) + 1} in Net.forward"
    assert written(found, "sinh") == (f"{HERE}:{line_of(Hyperbolic.forward) + 2}", beside)
    assert written(found, "cosh") == (f"{HERE}:{line_of(Net.shift.fget) + 2}", beside)
    assert written(found, "add") == (beside.partition(" in ")[0], None)


def test_where_a_call_of_a_module_raised() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(4, 4).half()

    def blamed(action: Any) -> str:
        with pytest.raises(RuntimeError) as refused:
            action()
        return raised_at(refused.value)

    assert blamed(lambda: Mixed()(X)) == f"{HERE}:{line_of(Mixed.forward) + 1}"
    assert blamed(lambda: nn.Linear(3, 3)(X)) == ""  # all lines of it are torch's
    assert blamed(lambda: helper(X.reshape(3))) == ""  # no module was called


def test_a_patched_model_passes_calls_on() -> None:
    """The generated file's frames lie between the user's line and torch's: the line is the user's all the same."""
    passing = "def forward(inner, x):\n    return inner(x)\n"
    names: dict[str, Any] = {}
    exec(compile(passing, "/somewhere/patched_model.py", "exec"), names)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 3)
            self.last.forward = partial(names["forward"], self.last.forward)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x)

    with pytest.raises(RuntimeError) as refused:
        Net()(X)
    assert raised_at(refused.value) == f"{HERE}:{line_of(Net.forward) + 1}"
