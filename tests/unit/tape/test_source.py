"""The line that wrote an operation: the user's own before a library's, and never torch's."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from auditor.tape.source import code_at, place_of_call
from tests.replaying import Model, linear, replayed
from tests.subjects import normal, only

X = normal(2, 4)
HERE = Path(__file__).name


def helper(x: Tensor) -> Tensor:
    return x.exp()


def lines(self: Any, x: Tensor) -> Tensor:
    y = helper(x)
    y = nn.functional.gelu(self.layer(y))
    return torch.vmap(lambda row: row.softmax(-1))(
        y.sigmoid(),
    )


def test_lines_of_helpers_modules_of_torch_and_transforms() -> None:
    first, second = inspect.getsourcelines(lines)[1], inspect.getsourcelines(helper)[1]
    found = replayed(Model(lines, layer=linear(4, 4)), X)
    assert only(found, "exp").source == f"{HERE}:{second + 1}"
    assert only(found, "exp").code == "return x.exp()"
    assert only(found, "linear").source == f"{HERE}:{first + 2}"
    assert only(found, "gelu").source == f"{HERE}:{first + 2}"
    assert only(found, "sigmoid").source == f"{HERE}:{first + 4}"  # of an expression over several lines, its own
    assert {Path(node.source_path or "").name for node in found.nodes.values()} == {HERE}


def test_a_librarys_line_where_the_user_has_none(tmp_path: Path, monkeypatch: Any) -> None:
    """The search ends where the run was started: what called it is not the model's code."""
    packages = Path(next(p for p in sys.path if p.endswith("site-packages")))
    made = ModuleType("some_library")
    source = "def block(x):\n    return x.cosh()\n"
    exec(compile(source, str(packages / "some_library.py"), "exec"), made.__dict__)

    class Block(nn.Module):
        forward = staticmethod(made.block)

    assert only(replayed(Block(), X), "cosh").source == "some_library.py:2"
    found = replayed(Model(lambda self, x: made.block(x)), X)
    assert (only(found, "cosh").source or "").startswith(f"{HERE}:")


def test_code_that_is_in_no_file() -> None:
    made = ModuleType("typed_in")
    exec(compile("def forward(self, x):\n    return x.sinh()\n", "<stdin>", "exec"), made.__dict__)
    Typed = type("Typed", (nn.Module,), {"forward": made.forward})
    assert only(replayed(Typed(), X), "sinh").source is None


def test_a_file_that_is_gone() -> None:
    assert code_at((f"{__file__}.gone", 3)) is None
    assert (
        code_at((__file__, 1))
        == '"""The line that wrote an operation: the user\'s own before a library\'s, and never torch\'s."""'
    )


def test_the_search_ends_at_the_outermost_frame() -> None:
    def outermost() -> Any:
        return inner()

    def inner() -> Any:
        return place_of_call(outermost.__code__)

    place = outermost()
    assert place is not None
    assert place[1] == inspect.getsourcelines(inner)[1] + 1
