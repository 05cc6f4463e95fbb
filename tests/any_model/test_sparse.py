"""Tensors that are not dense: sparse ones, held, taken, made and returned; nested ones; those of a class of their own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.masked import masked_tensor

import auditor
from auditor.errors import LoadError
from tests.any_model.holding import a_format, held, model_of
from tests.support.refusing import refused
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

EDGES = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of")


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
    "sparse output": lambda m, x: F.relu(m.first(x)).to_sparse(),
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


# Ragged batches: nested tensors of both layouts, padding masks, and packed sequences.


LAYOUTS = [torch.jagged, torch.strided]


def ragged(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([normal(n, 8, seed=n) for n in (3, 5, 2)], layout=layout)


ON_NESTED: dict[str, Callable[..., Any]] = {
    "padded": lambda m, x: torch.nested.to_padded_tensor(m.second(F.relu(m.first(x))), 0.0),
    "in and out": lambda m, x: m.second(F.relu(m.first(x))),
    "parts": lambda m, x: [part.mean(0) for part in m.first(x).unbind()],
    "softmax": lambda m, x: (m.first(x) * 2 + x).softmax(-1),
}


@pytest.mark.parametrize(("name", "layout"), thinned(zip(ON_NESTED, LAYOUTS * 2, strict=True), 2))
def test_nested_inputs(name: str, layout: torch.layout) -> None:
    held(lambda: (model_of(ON_NESTED[name]), ((ragged(layout),), {})), formats="fp16")


def test_nested_buffers() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.first(x) + torch.nested.to_padded_tensor(m.held, 0.0).sum((0, 1))

    held(lambda: (model_of(run, held=ragged(torch.strided)), ((normal(4, 8),), {})), formats="fp16")


def encoded(m: Any, x: Tensor, hidden: Tensor) -> Tensor:
    return m.layers(x, src_key_padding_mask=hidden)


@pytest.mark.parametrize("forward", thinned([encoded, torch.enable_grad()(encoded)]))
def test_encoders_with_a_padding_mask(forward: Callable[..., Tensor]) -> None:
    def encoder() -> nn.Module:
        return Model(forward, layers=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))

    hidden = torch.arange(6) >= torch.tensor([[6], [4]])
    held(lambda: (seeded(encoder), ((normal(2, 6, 8), hidden.clone()), {})), formats="fp16")


def attended(m: Any, x: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]), min_seqlen=1, max_seqlen=3)
    q = m.first(ragged).unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2).values()


def packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(m.gru(given)[0], batch_first=True)[0]


def test_attention_over_a_jagged_layout_and_packed_sequences() -> None:
    held(lambda: (model_of(attended), ((normal(4, 8),), {})), formats="fp16")
    gru = seeded(lambda: nn.GRU(8, 4, bidirectional=True, batch_first=True))
    batch = (normal(2, 5, 8), torch.tensor([3, 5]))
    held(lambda: (model_of(packed, gru=copy.deepcopy(gru)), (batch, {})), formats="fp16")


# Tensors of a class of their own that takes few operations: inside of a model they are audited, returned they are
# refused.


def inside(m: Model, x: Tensor) -> Tensor:
    hidden = m.first(x)
    return masked_tensor(hidden, x > 0).sum(-1).to_tensor(0.0)


def test_a_masked_tensor_inside_of_a_model() -> None:
    held(lambda: (Model(inside, first=linear(8, 8)).eval(), ((normal(4, 8),), {})))


@pytest.mark.parametrize("where", ["taken", "returned", "stored"])
def test_a_masked_tensor_that_is_taken_returned_or_stored_is_refused_in_one_line(where: str) -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        return masked_tensor(m.first(x), x > 0) if where == "returned" else m.first((x * 2).to_tensor(0.0))

    model, x = Model(forward, first=linear(8, 8)).eval(), normal(4, 8)
    if where == "stored":
        model.register_buffer("mask", masked_tensor(x, x > 0))
    with refused(LoadError, "tensor-class", match=r"MaskedTensor.*plain tensors"):
        auditor.audit(model, (masked_tensor(x, x > 0) if where == "taken" else x,), device="cpu")
