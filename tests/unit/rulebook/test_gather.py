"""Facts of toy models, put together: names, neighbours, autocast, and what a measurement adds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.records import Verdict
from auditor.rulebook.gather import gather, positions
from tests.support.capturing import captured, facts_of
from tests.support.subjects import capture_of


def test_verdicts_of_a_measurement_become_facts() -> None:
    toy = facts_of(lambda x: x.exp().sin(), torch.ones(2))
    assert (toy.facts["exp"].verdict, toy.facts["exp"].reason) == ({}, {})
    verdicts = {"exp": {"fp16": Verdict("unsafe", "overflow"), "bf16": Verdict("safe", "fine")}}
    facts = gather(toy.capture, toy.ranges, verdicts)
    assert (facts["exp"].verdict["fp16"], facts["exp"].reason["fp16"]) == ("unsafe", "overflow")
    assert (facts["exp"].verdict["bf16"], facts["exp"].reason["bf16"]) == ("safe", "fine")
    assert facts["sin"].verdict == {}


def test_what_autocast_does_to_an_operation() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        bilinear = F.bilinear(x, y, torch.ones(1, 2, 2))
        return [x @ y, x.softmax(-1), x.exp(), x.relu(), bilinear, F.binary_cross_entropy(x, y), x.sum()]

    facts = facts_of(function, torch.ones(2, 2), torch.ones(2, 2)).facts
    assert {fact.operation: fact.autocast for fact in facts.values() if fact.operation != "ones"} == {
        "matmul": "lower",
        "softmax": "fp32_unless_dtype",
        "exp": "fp32",
        "relu": "none",
        "bilinear": "promote",
        "binary_cross_entropy": "banned",
        "sum": "fp32_unless_dtype",
    }
    assert captured(nn.LSTM(2, 2), torch.ones(2, 1, 2)).facts["lstm"].autocast == "lower"


def test_neighbours_look_through_reshapes_and_casts() -> None:
    facts = facts_of(lambda x: x.softmax(-1).view(-1).float().view(2, 2) @ x.exp(), torch.ones(2, 2)).facts
    assert facts["softmax"].consumers == ("aten.matmul.default",)
    assert facts["matmul"].producers == ("aten.exp.default", "aten.softmax.int")


class Residual(nn.Module):
    """Two branches behind a weight-normalised stem; the scale is a parameter but no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.size = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 1))
        self.scale = nn.Parameter(torch.ones(4))
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.size * self.direction / self.direction.norm(dim=1, keepdim=True)
        x = F.linear(x * self.scale, weight)
        return (self.left(x) + self.right(x)).view(-1).to(x.dtype)


def test_first_and_last_layers_by_graph_position() -> None:
    facts = captured(Residual(), torch.ones(2, 4)).facts
    assert [name for name, fact in facts.items() if fact.is_first_layer] == ["linear"]
    assert [name for name, fact in facts.items() if fact.is_last_layer] == ["linear_1", "linear_2"]
    weights = {name for name, fact in facts.items() if fact.from_weights}
    assert {facts[name].op for name in weights} >= {"aten.mul.Tensor", "aten.div.Tensor"}
    assert not weights & {"linear", "linear_1", "linear_2"}


class Tokens(nn.Module):
    """An embedding written as an index, a layer, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.layer(self.table[ids]).tanh(), self.table).squeeze(0)


def test_an_index_into_a_table_is_the_first_layer() -> None:
    traced = capture_of(Tokens(), torch.tensor([[1, 2]]))
    found = positions(traced)
    assert (found.first, found.last) == ({"index"}, {"linear_1"})
    assert not found.from_weights & traced.nodes.keys()


def test_what_reaches_no_output_is_no_last_layer() -> None:
    class Unused(Tokens):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.layer(self.table[ids])
            self.layer(x.exp())
            return x

    found = positions(capture_of(Unused(), torch.tensor([[1, 2]])))
    assert found.last == {"linear"}
