"""A run that begins from another one gives what it gives from the start, to the bit, and runs what differs alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.measure.rounded import rounder
from auditor.records import Capture
from auditor.replay.again import PartlyLowAgain, PolicyAgain, Run, begun, kept
from auditor.replay.execute import PartlyLow, PolicyInterpreter
from auditor.replay.running import Running
from auditor.replay.strategies import running
from auditor.tape import capture
from tests.subjects import FORMATS, normal, seeded, subject_of


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


def under(found: Capture, strategy: str, format: str, kept_wide: set[str]) -> Running:
    return running(found, strategy, lambda owner: "fp32" if owner in kept_wide else format, format)


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
            how = under(found, strategy, format, second)
            again = PolicyAgain(found, how, before).run(*flat)
            (whole,) = PolicyInterpreter(found, how).run(*flat)
            assert again[0].dtype == whole.dtype
            assert torch.equal(again[0], whole)


def test_only_what_differs_is_run() -> None:
    model, x = seeded(Net), normal(3, 8)
    found = capture(subject_of(model, x), FORMATS)
    flat = flat_of(found, model, x)
    with torch.no_grad():
        (whole,), before = begun(found, flat, under(found, "autocast", "bf16", set()))
        same = PolicyAgain(found, under(found, "autocast", "bf16", set()), before)
        (result,) = same.run(*flat)
        late = PolicyAgain(found, under(found, "autocast", "bf16", {"blocks.3.up"}), before)
        late.run(*flat)
    assert same.changed == set()
    assert torch.equal(result, whole)
    owners = {found.nodes[n.name].owner for n in late.changed if n.name in found.nodes}
    assert "blocks.3.up" in owners
    assert not owners & {"side", "blocks.0.up", "blocks.2.down", "blocks.3.norm"}


def _computed(found: Capture, how: Running, flat: list[Any], before: Run) -> set[str]:
    """Operations that a run computes which begins from another one."""
    ran: set[str] = set()

    class Told(PolicyAgain):
        def ran(self, n: Any, arrived: Any, handed: Any, result: Any) -> None:
            ran.add(n.name)

    Told(found, how, before).run(*flat)
    return ran


def test_some_operations_low_as_from_the_start() -> None:
    model, x = seeded(Net), normal(3, 8)
    found = capture(subject_of(model, x), FORMATS)
    flat = flat_of(found, model, x)
    inside = {name for name, node in found.nodes.items() if node.owner == "blocks.2.up"}
    with torch.no_grad():
        before = kept(found, flat)
        again = PartlyLowAgain(found, inside, "fp16", rounder(found, "fp16"), before)
        (late,) = again.run(*flat)
        (whole,) = PartlyLow(found, inside, "fp16", rounder(found, "fp16")).run(*flat)
        assert torch.equal(late, whole)
        assert not torch.equal(late, model(x))
    owners = {found.nodes[n.name].owner for n in again.changed if n.name in found.nodes}
    assert not owners & {"side", "blocks.0.up", "blocks.1.down"}
