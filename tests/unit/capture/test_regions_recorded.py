"""Autocast regions the author wrote, remembered node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.capturing import Function
from tests.support.subjects import capture_of, nodes_by_op, only

SQUARE = torch.eye(3)


def regions(function: Any, *inputs: Tensor) -> dict[str, tuple[bool, str]]:
    """{operation: region} of a function."""
    found = capture_of(Function(function), *inputs)
    return {
        n.op.split(".")[1]: (n.region.enabled, n.region.dtype) for n in found.nodes.values() if n.region is not None
    }


def nested(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = x.exp()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = y.matmul(y)
            with torch.autocast("cpu", enabled=False):
                y = y.float().sigmoid()
        y = y.tanh()
    return y.sum()


def test_the_innermost_region_counts() -> None:
    found = regions(nested, SQUARE)
    assert found["matmul"] == (True, "bfloat16")
    assert {name: on for name, (on, _) in found.items() if name != "to"} == {
        "exp": False,
        "matmul": True,
        "sigmoid": False,
        "tanh": False,
    }


class Asking(nn.Module):
    """Switches autocast off only where it is on, as careful library code does."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return x.float().matmul(x.float())
        return x.matmul(x)


def test_code_that_asks_whether_autocast_is_on_shows_what_it_protects() -> None:
    found = capture_of(Asking(), SQUARE)
    region = only(found, "matmul").region
    assert not region.enabled


class Island(nn.Module):
    """A region around calls of submodules, which keep their names inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            y = self.inside(x)
            z = y.exp()
        return self.outside(y), z


def test_owners_lines_and_outputs_survive_inlining() -> None:
    found = capture_of(Island(), torch.ones(2, 3))
    inside, outside = nodes_by_op(found, "linear")
    assert (inside.owner, outside.owner) == ("inside", "outside")
    assert inside.source.startswith("test_regions_recorded.py:")
    assert {name for name, node in found.nodes.items() if node.region} == {inside.name, only(found, "exp").name}
    assert found.outputs == (outside.name, only(found, "exp").name)
