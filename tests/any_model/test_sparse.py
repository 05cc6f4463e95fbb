"""Models that hold, take, make and return sparse tensors, and those whose gradients are sparse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.any_model.holding import a_format, held, model_of
from tests.support.subjects import normal
from tests.support.thinned import thinned

EDGES = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def adjacency(layout: torch.layout = torch.sparse_coo) -> Tensor:
    return (normal(4, 4).relu() + torch.eye(4)).to_sparse(layout=layout)


def repeated() -> Tensor:
    """Not coalesced: two edges are told twice."""
    return torch.sparse_coo_tensor(torch.cat([EDGES, EDGES[:, :2]], 1), normal(7).abs(), (4, 4))


def attention(m: Any, x: Tensor) -> Tensor:
    scores = (m.first(x)[EDGES[0]] * m.second(x)[EDGES[1]]).sum(-1)
    return torch.sparse.mm(torch.sparse.softmax(torch.sparse_coo_tensor(EDGES, scores, (4, 4)), 1), m.third(x))


def normalized(m: Any, x: Tensor, a: Tensor) -> Tensor:
    scale = torch.sparse.sum(a, 1).to_dense().rsqrt()[:, None]
    return scale * (a @ (scale * m.first(x)))


def by_entries(m: Any, x: Tensor, a: Tensor) -> Tensor:
    a = a.coalesce()
    return torch.zeros_like(x).index_add_(0, a.indices()[0], a.values()[:, None] * m.first(x)[a.indices()[1]])


ONLY_DENSE: dict[str, Callable[..., Any]] = {
    "attention over edges": attention,
    "learned edges": lambda m, x: torch.sparse.mm(torch.sparse_coo_tensor(EDGES, m.edges.exp(), (4, 4)), m.first(x)),
    "sparse activations": lambda m, x: torch.sparse.mm(F.relu(m.first(x)).to_sparse(), m.square),
    "there and back": lambda m, x: m.second(F.relu(m.first(x)).to_sparse().to_dense()),
    "sparse output": lambda m, x: F.relu(m.first(x)).to_sparse(),
    "no entries": lambda m, x: (
        torch.sparse.mm(torch.sparse_coo_tensor(torch.empty(2, 0).long(), torch.empty(0), (4, 4)), x) + m.first(x)
    ),
}

WITH_A_GRAPH: dict[str, Callable[..., Any]] = {
    "convolution": lambda m, x, a: m.second(F.relu(torch.sparse.mm(a, m.first(x)))),
    "normalized": normalized,
    "by entries": by_entries,
    "powers": lambda m, x, a: torch.sparse.mm(a, torch.sparse.mm(a, m.first(x))) + m.second(x),
    "masked": lambda m, x, a: (m.first(x) @ m.second(x).t()).sparse_mask(a.coalesce()).to_dense(),
    "returned, scaled": lambda m, x, a: (m.first(x), a * 2),
    "half": lambda m, x, a: a.half().float() @ m.first(x),
}


@pytest.mark.parametrize("name", thinned(ONLY_DENSE))
def test_sparse_on_the_way(name: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        state = {"edges": nn.Parameter(normal(5)), "square": nn.Parameter(normal(8, 8, seed=4))}
        return model_of(ONLY_DENSE[name], **state), ((normal(4, 8),), {})

    held(build, formats=a_format(name))


@pytest.mark.parametrize("name", thinned(WITH_A_GRAPH))
def test_sparse_inputs(name: str) -> None:
    graphs = {"by entries": repeated, "powers": repeated, "convolution": lambda: adjacency(torch.sparse_csr)}
    graph = graphs.get(name, adjacency)
    held(lambda: (model_of(WITH_A_GRAPH[name]), ((normal(4, 8), graph()), {})), formats="bf16")


def test_a_sparse_parameter() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return torch.sparse.mm(m.adjacency, m.first(x))

    held(lambda: (model_of(run, adjacency=nn.Parameter(adjacency())), ((normal(4, 8),), {})), formats="bf16")


@pytest.mark.parametrize("name", ["embedding", "graph"])
def test_training_with_sparse_gradients(name: str) -> None:
    table = normal(8, 8, seed=3)

    def build() -> tuple[nn.Module, Any]:
        if name == "graph":
            return model_of(ONLY_DENSE["learned edges"], edges=nn.Parameter(normal(5))), ((normal(4, 8),), {})
        made = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        return model_of(lambda m, i: m.first(m.table(i)), table=made), ((torch.tensor([1, 2, 2]),), {})

    audit = held(build, mode="training", loss_fn=lambda y: y.square().mean())
    assert all(0 < error < 0.01 for error in audit.training.errors.values() if error is not None)
    assert audit.training.errors["bf16"] is not None
