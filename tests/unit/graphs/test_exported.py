"""Exporting: the graph answers as the model does, for batches of any size where the model allows it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import PlanError
from auditor.graphs.exported import export_model
from auditor.numerics.nodes import mutates
from auditor.records import Batch
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.unit.graphs.models import flat


class Written(nn.Module):
    """Writes in place, norms by statistics, drops out, casts to what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.conv(x)))
        y[:, 0] = 2 * y[:, 0]
        return self.drop(y).to(x.dtype)


def fixed() -> nn.Module:
    return Function(lambda x: x.softmax(1) * torch.arange(4.0)[:, None])


@dataclass
class Pair:
    left: Tensor
    right: Tensor


class Classed(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Pair:
        return Pair(x.exp(), x.sin() * scale)


def leaves(found: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(found)


@pytest.mark.parametrize("made", [Written, flat])
@pytest.mark.parametrize("size", [1, 3])
def test_the_graph_answers_as_the_model_for_any_size(made: Callable[[], nn.Module], size: int) -> None:
    torch.manual_seed(0)
    model, shape = made().eval(), (4, 16)
    trailing = shape if made is Written else shape[1:]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = export_model(model, ((torch.randn(size, *trailing),), {}))
    assert found.fixed == ""
    for other in (1, 2, 5):
        x = torch.randn(other, *trailing)
        with torch.no_grad():
            ours, theirs = leaves(found.graph_module(x)), leaves(model(x.clone()))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_nothing_is_written_in_place_and_no_cast_changes_nothing() -> None:
    nodes = export_model(Written().eval(), ((torch.randn(2, 4, 16),), {})).graph_module.graph.nodes
    called = [node for node in nodes if node.op == "call_function"]
    assert not any(mutates(node.target) for node in called)
    names = {str(node.target) for node in called}
    assert "aten.batch_norm.default" in names
    assert not names & {"aten.to.dtype", "aten.dropout.default"}


def test_a_size_that_the_model_fixes_is_said() -> None:
    batch: Batch = ((torch.randn(4, 6),), {})
    found = export_model(fixed(), batch)
    assert found.fixed
    torch.testing.assert_close(found.graph_module(batch[0][0]), fixed()(batch[0][0]))


def test_inputs_of_several_sizes_keep_them() -> None:

    found = export_model(Function(lambda x, y: x.sum() + y), ((torch.randn(2), torch.randn(3)), {}))
    assert found.fixed == "the inputs do not share a first dimension"


class Named(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, scale: float = 1.0, **others: Tensor) -> Tensor:
        return x * others["by"] * scale + sum(rest)


def test_sizes_are_open_whatever_the_arguments_are_called() -> None:
    found = export_model(Named(), ((torch.randn(3, 4), torch.randn(3, 4)), {"by": torch.randn(3, 4), "scale": 2.0}))
    assert found.fixed == ""
    x = torch.randn(5, 4)
    torch.testing.assert_close(found.graph_module(x, x, by=x, scale=2.0), 2 * x * x + x)


def test_what_takes_nothing_is_said_to() -> None:

    assert export_model(Function(lambda: torch.ones(3).exp()), ((), {})).fixed == "it takes no tensors"


def test_classes_of_the_users_own_become_names() -> None:
    x = torch.randn(3, 4)
    found = export_model(Classed(), ((x,), {"scale": 2.0})).graph_module(x, scale=2.0)
    assert list(found) == ["left", "right"]
    torch.testing.assert_close(found["right"], 2 * x.sin())


def test_what_torch_does_not_export_is_one_line() -> None:
    with refused(PlanError, "cannot-export", match="cannot be exported as a graph"):
        export_model(Function(lambda x: x.exp() if x.sum() > 0 else x.sin()), ((torch.randn(3),), {}))
