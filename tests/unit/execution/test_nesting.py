"""Which modules a plan wraps, and what happens to values on their way, on three nested modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.policy import Boundary, Policy
from auditor.records import Capture
from tests.support.subjects import capture_of, only


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sin()).cos()


class Net(nn.Module):
    """x -> sin -> exp -> cos -> tanh: root, outer and inner in one line."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x).tanh()


@pytest.fixture(scope="module")
def net() -> Capture:
    return capture_of(Net(), torch.ones(2))


def choice(**precisions: str) -> Callable[[str], str]:
    """Precision by path, with dots as underscores; the root is `root`."""
    return lambda path: precisions[path.replace(".", "_") or "root"]


def test_only_what_differs_from_above_is_wrapped(net: Capture) -> None:
    low = Policy(net, "cast", choice(root="fp16", outer="fp16", outer_inner="fp16"), "fp16").wrapped
    assert low == {"": Boundary("fp16", False, "fp16", None)}
    island = Policy(net, "cast", choice(root="fp16", outer="fp16", outer_inner="fp32"), "fp16").wrapped
    assert set(island) == {"", "outer.inner"}
    # what comes out of the island is lowered again: `cos` reads it low
    assert island["outer.inner"] == Boundary("fp32", False, "fp32", "fp16")
    around = Policy(net, "cast", choice(root="fp32", outer="fp16", outer_inner="fp32"), "fp16").wrapped
    assert {path: found.precision for path, found in around.items()} == {
        "": "fp32",
        "outer": "fp16",
        "outer.inner": "fp32",
    }


def test_an_island_that_nothing_low_reads_keeps_its_result(net: Capture) -> None:
    wide = Policy(net, "cast", choice(root="fp32", outer="fp32", outer_inner="fp16"), "fp16").wrapped
    assert wide[""].keeps
    assert not Policy(net, "cast", choice(root="fp16", outer="fp32", outer_inner="fp32"), "fp16").wrapped["outer"].keeps


def test_values_leave_the_innermost_first_and_enter_the_outermost_first(net: Capture) -> None:
    passage = Policy(net, "cast", choice(root="fp32", outer="fp16", outer_inner="fp32"), "fp16")
    (x,) = (place.name for place in net.placeholders)
    assert passage.crossing(x, "sin") == ("fp32", "fp16")  # into the root, into outer
    assert passage.crossing("sin", "exp") == ("fp32",)
    assert passage.crossing("exp", "cos") == ("fp16",)
    assert passage.crossing("cos", "tanh") == ("fp32",)
    assert [call.path for call in passage.enclosing("exp")] == ["", "outer", "outer.inner"]


def test_under_autocast_values_are_raised_alone(net: Capture) -> None:
    passage = Policy(net, "autocast", choice(root="fp16", outer="fp16", outer_inner="fp32"), "fp16")
    assert passage.crossing("sin", "exp") == ("fp32",)
    assert passage.crossing("exp", "cos") == ()
    inside = Policy(net, "autocast", choice(root="fp32", outer="fp16", outer_inner="fp16"), "fp16")
    assert inside.crossing("sin", "exp") == ()
    assert inside.crossing("cos", "tanh") == ("fp32",)


def test_weights_pass_no_boundary() -> None:
    captured = capture_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2))
    passage = Policy(captured, "cast", lambda path: "fp16", "fp16")
    weight = next(place.name for place in captured.placeholders if place.kind == "parameter")
    assert passage.crossing(weight, only(captured, "linear").name) == ()


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Inner()
        self.b = nn.Sequential(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sin())


def test_a_module_in_two_scopes_that_differ_is_fp32() -> None:
    captured = capture_of(Twice(), torch.ones(2))
    precision = {"": "fp16", "a": "fp16", "b": "fp16", "b.0": "fp16"}
    assert captured.aliases == {"a": ("b.0",)}
    assert Policy(captured, "cast", precision.__getitem__, "fp16").wrapped.keys() == {""}
    wide = Policy(captured, "cast", lambda path: "fp32" if path == "" else "fp16", "fp16")
    assert wide.wrapped.keys() == {
        ""
    }  # `b` has no operation of its own: under its other name the module belongs to the root
