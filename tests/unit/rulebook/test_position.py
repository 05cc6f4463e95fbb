"""Where a node stands: first and last layers, outputs, arithmetic on weights alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.rulebook.gather import positions
from tests.capturing import captured
from tests.subjects import capture_of


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
