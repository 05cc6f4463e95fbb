"""A run that begins from another one gives what it gives from the start, to the bit, and runs what differs alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.execution.execute import Executor, Run, Semantics, SomeLow
from auditor.execution.policy import Policy
from auditor.measure.alone import rounder
from auditor.records import Capture
from tests.support.subjects import FORMATS, normal, seeded, subject_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.softmax(self.up(self.norm(x)), -1))


class Asking(nn.Module):
    """Adds what it chooses by whether autocast is on: nothing else tells its runs apart."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is not torch.float32
        return x + (1e-1 if low else 1e-6)


class Net(nn.Module):
    """Blocks, and a branch that none of them reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.side, self.head, self.asking = nn.Linear(8, 8), nn.Linear(8, 4), Asking()

    def forward(self, x: Tensor) -> Tensor:
        side = self.side(x).sum(-1, keepdim=True)
        x = self.asking(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + side


def flat_of(found: Capture, model: nn.Module, x: Tensor) -> list[Any]:
    return found.bind(model, ((x,), {}))


def under(found: Capture, strategy: str, format: str, kept_wide: set[str]) -> Policy:
    return Policy(found, strategy, lambda owner: "fp32" if owner in kept_wide else format, format)


def begun(found: Capture, flat: list[Any], policy: Policy) -> tuple[Any, Run]:
    """What a run gives, and the run for others to begin from."""
    values: dict[str, Any] = {}
    result = Executor(found.graph_module, policy, lambda n, value: values.update({n.name: value})).run(*flat)
    return result, Run(values, policy)


def owners_of(found: Capture, flat: list[Any], policy: Policy, before: Run) -> set[str]:
    """Modules of the operations that a run computes which begins from another one."""
    ran: set[str] = set()
    Executor(found.graph_module, policy, lambda n, _: ran.add(n.name), before).run(*flat)
    return {node.owner for name, node in found.nodes.items() if name in ran}


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("format", FORMATS)
def test_any_two_policies_one_from_the_other(strategy: str, format: str) -> None:
    model, x = seeded(Net), normal(3, 8)
    found = capture(subject_of(model, x), FORMATS)
    flat = flat_of(found, model, x)
    owners, rnd = sorted({node.owner for node in found.nodes.values()}), random.Random(0)
    with torch.no_grad():
        for number in range(6):
            first, second = ({owner for owner in owners if rnd.random() < 0.4} for _ in range(2))
            if not number:  # two that differ in what the module asks alone
                first, second = second | {"asking"}, second - {"asking"}
            _, before = begun(found, flat, under(found, strategy, format, first))
            policy = under(found, strategy, format, second)
            again = Executor(found.graph_module, policy, before=before).run(*flat)
            (whole,) = Executor(found.graph_module, policy).run(*flat)
            assert again[0].dtype == whole.dtype
            assert torch.equal(again[0], whole)


def test_only_what_differs_is_run() -> None:
    model, x = seeded(Net), normal(3, 8)
    found = capture(subject_of(model, x), FORMATS)
    flat = flat_of(found, model, x)
    same, late = (under(found, "autocast", "bf16", kept_wide) for kept_wide in (set[str](), {"blocks.3.up"}))
    with torch.no_grad():
        (whole,), before = begun(found, flat, under(found, "autocast", "bf16", set()))
        (result,) = Executor(found.graph_module, same, before=before).run(*flat)
        assert torch.equal(result, whole)
        assert owners_of(found, flat, same, before) == set()
        owners = owners_of(found, flat, late, before)
    assert "blocks.3.up" in owners
    assert not owners & {"side", "blocks.0.up", "blocks.2.down", "blocks.3.norm"}


def test_some_operations_low_as_from_the_start() -> None:
    model, x = seeded(Net), normal(3, 8)
    found = capture(subject_of(model, x), FORMATS)
    flat = flat_of(found, model, x)
    inside = {name for name, node in found.nodes.items() if node.owner == "blocks.2.up"}
    with torch.no_grad():
        _, before = begun(found, flat, Semantics())
        low, again = (SomeLow(found, inside, "fp16", rounder(found, "fp16")) for _ in range(2))
        (late,) = Executor(found.graph_module, low, before=before).run(*flat)
        (whole,) = Executor(found.graph_module, again).run(*flat)
        assert torch.equal(late, whole)
        assert not torch.equal(late, model(x))
        owners = owners_of(found, flat, SomeLow(found, inside, "fp16", rounder(found, "fp16")), before)
    assert "blocks.2.up" in owners
    assert not owners & {"side", "blocks.0.up", "blocks.1.down"}
