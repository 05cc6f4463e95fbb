"""Models as engineers write them: each ends in an audit whose verified plans hold when they are applied by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from tests.any_model.holding import held
from tests.replaying import Model, linear
from tests.subjects import normal

X = normal(4, 8)


@torch.library.custom_op("any_python::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


@torch.library.custom_op("any_python::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    assert x.dtype is torch.float32
    return x.sin()


def sampler(m: Any, x: Tensor) -> Tensor:
    chosen = torch.multinomial(m.first(x).softmax(-1), 1).squeeze(1)
    result: Tensor = m.table(chosen)
    return result


def neighbours(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    return h[torch.cdist(h, h).topk(2, largest=False).indices].mean(1)


def within_a_radius(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    i, j = torch.nonzero(torch.cdist(h, h) < 3, as_tuple=True)
    return torch.zeros_like(h).index_add_(0, i, m.second(h[j]))


def matcher(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    alike = F.cosine_similarity(h[:, None], h[None], -1)
    return m.second(h[alike.fill_diagonal_(0).amax(-1) > -1]).sum(0)


def experts(m: Any, x: Tensor) -> Tensor:
    route, out = m.first(x)[:, :2].argmax(-1), torch.zeros_like(x)
    for index, expert in enumerate((m.second, m.third)):
        rows = torch.where(route == index)[0]
        out[rows] = expert(x[rows])
    return out


def forces(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.requires_grad_()
    energy = torch.tanh(m.first(x)).sum()
    return energy, torch.autograd.grad(energy, x)[0]


def pooled_in_place(m: Any, x: Tensor) -> Tensor:
    """Writes into views of what was just made, and into what they are views of."""
    where = torch.tensor([0, 1, 1, 0])
    sums = torch.zeros(2, 8).index_add_(0, where, m.first(x))
    sums.view(-1, 4).div_(torch.bincount(where).repeat_interleave(2)[:, None])
    sums[0].mul_(2)
    return m.second(sums)


def reparametrised(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    return m.second(h + torch.randn_like(h) * h.tanh().exp())


def cached(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "tables"):
        m.tables = {}
    if x.dtype not in m.tables:
        m.tables[x.dtype] = torch.cos(torch.arange(8.0)).to(x.dtype)
    return m.first(x) * m.tables[x.dtype]


def counting(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(1)
    m.history.append(float(m.seen))
    return m.first(x) / m.seen


MODELS: dict[str, Callable[..., Any]] = {
    "token sampler": sampler,
    "nearest neighbours": neighbours,
    "graph within a radius": within_a_radius,
    "matcher with a threshold": matcher,
    "experts in a loop": experts,
    "forces": forces,
    "writes into views": pooled_in_place,
    "random numbers": reparametrised,
    "table by dtype": cached,
    "state": counting,
    "vmap": lambda m, x: torch.vmap(lambda row: m.first(row).softmax(-1))(x),
    "jacobian": lambda m, x: torch.vmap(torch.func.jacrev(lambda row: torch.tanh(m.first(row))))(x),
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda y: m.first(y), lambda y: m.second(y), (x,)),
    "item": lambda m, x: m.first(x) * x.abs().max().item(),
    "operator without a derivative": lambda m, x: m.second(square(m.first(x))),
    "operator that refuses half": lambda m, x: m.second(picky(m.first(x))),
    "no second derivative": lambda m, x: torch.special.gammaincc(m.first(x).exp(), x.exp()),
    "floor division": lambda m, x: m.second((m.first(x) * 8).floor_divide(1.0) / 8),
    "dropout of its own": lambda m, x: m.second(F.dropout(m.first(x), 0.5, training=True)),
}


def model_of(name: str) -> nn.Module:
    parts = {"first": linear(8, 8), "second": linear(8, 8, seed=1), "third": linear(8, 8, seed=2)}
    table = nn.Embedding.from_pretrained(normal(8, 8, seed=3), freeze=False)
    return Model(MODELS[name], **parts, table=table, seen=torch.zeros(()), history=[]).eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_ends_in_an_audit_and_verified_plans_hold(name: str) -> None:
    held(lambda: (model_of(name), ((X.clone(),), {})))


def test_state_of_its_own_comes_back() -> None:
    model = model_of("state")
    auditor.audit(model, (X,), device="cpu")
    assert model.history == [] and model.seen == 0
    model = model_of("table by dtype")
    auditor.audit(model, (X,), device="cpu")
    assert not hasattr(model, "tables")


def test_an_operator_that_refuses_half_is_told_by_name() -> None:
    audit = auditor.audit(model_of("operator that refuses half"), (X,), device="cpu")
    (refused,) = (report for report in audit.nodes if "picky" in report.node.op)
    assert {verdict.verdict for verdict in refused.verdicts.values()} == {"unsafe"}
    assert "picky" in refused.verdicts["fp16"].reason
