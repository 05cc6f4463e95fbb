"""What forwards are called with: objects of the author's own, containers, numbers, and tensors of odd make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.errors import LoadError
from tests.any_model.holding import held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal


@dataclass
class Fields:
    x: Tensor
    mask: Tensor | None = None


class Graph:
    """As graph libraries have it: attributes, and ways to move and copy them."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def to(self, device: Any) -> Graph:
        return Graph(**{key: value.to(device) for key, value in vars(self).items()})


class Store:
    """Attributes that live in a dictionary."""

    def __init__(self, **held: Any) -> None:
        object.__setattr__(self, "store", held)

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("store", {})
        if name not in held:
            raise AttributeError(name)
        return held[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.store[name] = value


class Tagged(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Weight(nn.Parameter):
    pass


def messages(m: Any, g: Any) -> Tensor:
    found: Tensor = m.second(torch.zeros_like(g.x).index_add_(0, g.edges[1], m.first(g.x)[g.edges[0]]))
    return found


def written(m: Any, g: Any) -> Tensor:
    g.x = m.first(g.x)
    result: Tensor = m.second(g.x)
    return result


def in_place(m: Any, g: Any) -> Tensor:
    result: Tensor = m.second(g.x.mul_(2))
    return result


def popped(m: Any, given: Any) -> Tensor:
    result: Tensor = m.first(given.pop("x"))
    return result


EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "dataclass": (lambda m, b: m.first(b.x) if b.mask is None else b.x, lambda: (Fields(normal(4, 8)),)),
    "store": (messages, lambda: (Store(x=normal(4, 8), edges=EDGES.clone()),)),
    "graph that is set": (written, lambda: (Graph(x=normal(4, 8)),)),
    "graph that is written": (in_place, lambda: (Graph(x=normal(4, 8)),)),
    "namespace": (lambda m, b: m.first(b.x), lambda: (SimpleNamespace(x=normal(4, 8)),)),
    "popped": (popped, lambda: ({"x": normal(4, 8), "y": 1},)),
    "objects in a list": (lambda m, xs: [m.first(x.x) for x in xs], lambda: ([Fields(normal(n, 8)) for n in (3, 1)],)),
    "numbers": (lambda m, x, a, b, c: m.first(x) * a / b if c is None else x, lambda: (normal(4, 8), 2.5, 3, None)),
    "text": (lambda m, x, how: getattr(m, how)(x), lambda: (normal(4, 8), "first")),
    "array": (lambda m, x: m.first(torch.from_numpy(x)), lambda: (normal(4, 8).numpy().copy(),)),
    "no rows": (lambda m, x: m.first(x), lambda: (normal(0, 8),)),
    "subclass": (lambda m, x: m.first(x).relu(), lambda: (normal(4, 8).as_subclass(Tagged),)),
    "module": (lambda m, x, layer: layer(m.first(x)), lambda: (normal(4, 8), linear(8, 8, seed=5))),
    "overlapping": (lambda m, x: m.first(x), lambda: (normal(16).as_strided((4, 8), (2, 1)),)),
    "with gradients": (lambda m, x: m.first(x), lambda: (normal(4, 8).requires_grad_(),)),
    "bytes": (lambda m, x: m.first(x.float() / 255), lambda: ((normal(4, 8).abs() * 50).to(torch.uint8),)),
}


def model_of(function: Callable[..., Any], **state: Any) -> nn.Module:
    return Model(function, first=linear(8, 8), second=linear(8, 8, seed=1), **state).eval()


@pytest.mark.parametrize("name", CALLS)
def test_inputs(name: str) -> None:
    function, call = CALLS[name]
    held(lambda: (model_of(function), (call(), {})))


def doubled(m: Any, x: Any, by: Any = 2.0) -> Tensor:
    x *= by
    result: Tensor = m.first(torch.from_numpy(x))
    return result


def test_an_array_that_is_written_comes_back() -> None:
    given = normal(4, 8).numpy().copy()
    audit = auditor.audit(model_of(doubled), (given,), kwargs={"by": np.float32(3)}, device="cpu")
    assert audit.plans["autocast_fp16"].verified
    assert np.array_equal(given, normal(4, 8).numpy())


@pytest.mark.parametrize("as_keyword", [False, True])
def test_an_iterator_is_refused_in_one_line(as_keyword: bool) -> None:
    model, given = model_of(lambda m, xs: sum(m.first(x) for x in xs)), iter([normal(4, 8)])
    with pytest.raises(LoadError, match=r"iterator.*list") as caught:
        auditor.audit(model, None if as_keyword else (given,), kwargs={"xs": given} if as_keyword else None)
    assert caught.value.slug == "bad-inputs"
    assert len(list(given)) == 1


STATE: dict[str, tuple[Callable[..., Any], Callable[[], Tensor]]] = {
    "parameter of its own class": (lambda m, x: x @ m.held, lambda: Weight(normal(8, 8))),
    "one entry for all": (lambda m, x: m.first(x) * m.held, lambda: torch.tensor(2.0).expand(8)),
    "parameter with one entry for all": (
        lambda m, x: m.first(x) * m.held,
        lambda: nn.Parameter(torch.tensor(2.0).expand(8)),
    ),
}


@pytest.mark.parametrize("name", STATE)
def test_state(name: str) -> None:
    function, make = STATE[name]
    held(lambda: (model_of(function, held=make()), ((normal(4, 8),), {})))


@pytest.mark.parametrize("function", [lambda m, x: m.first(x), lambda m, x: m.first(x) * m.held.shape[0]])
def test_a_buffer_without_values(function: Callable[..., Any]) -> None:
    audit = auditor.audit(model_of(function, held=torch.empty(8, device="meta")), (normal(4, 8),), device="cpu")
    assert audit.plans["autocast_fp16"].verified
