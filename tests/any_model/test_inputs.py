"""What forwards are called with, what they return, and loops that wait for two numbers to agree."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import auditor
from tests.any_model.holding import a_format, held, model_of
from tests.support.replaying import Model, linear
from tests.support.subjects import normal
from tests.support.thinned import thinned


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


class Tagged(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Weight(nn.Parameter):
    pass


def written(m: Any, g: Any) -> Tensor:
    g.x = m.first(g.x)
    return m.second(g.x)


def grown(m: Any, x: Tensor, cache: Graph) -> Tensor:
    cache.past.append(m.first(x))
    return m.second(torch.cat([part.to(x.dtype) for part in cache.past]))


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "dataclass": (lambda m, b: m.first(b.x) if b.mask is None else b.x, lambda: (Fields(normal(4, 8)),)),
    "graph that is set": (written, lambda: (Graph(x=normal(4, 8)),)),
    "cache that grows": (grown, lambda: (normal(4, 8), Graph(past=[normal(2, 8)]))),
    "graph that is written": (lambda m, g: m.second(g.x.mul_(2)), lambda: (Graph(x=normal(4, 8)),)),
    "namespace": (lambda m, b: m.first(b.x), lambda: (SimpleNamespace(x=normal(4, 8)),)),
    "popped": (lambda m, given: m.first(given.pop("x")), lambda: ({"x": normal(4, 8), "y": 1},)),
    "numbers": (lambda m, x, a, b, c: m.first(x) * a / b if c is None else x, lambda: (normal(4, 8), 2.5, 3, None)),
    "text": (lambda m, x, how: getattr(m, how)(x), lambda: (normal(4, 8), "first")),
    "no rows": (lambda m, x: m.first(x), lambda: (normal(0, 8),)),
    "subclass": (lambda m, x: m.first(x).relu(), lambda: (normal(4, 8).as_subclass(Tagged),)),
    "module": (lambda m, x, layer: layer(m.first(x)), lambda: (normal(4, 8), linear(8, 8, seed=5))),
    "overlapping": (lambda m, x: m.first(x), lambda: (normal(16).as_strided((4, 8), (2, 1)),)),
    "with gradients": (lambda m, x: m.first(x), lambda: (normal(4, 8).requires_grad_(),)),
    "bytes": (lambda m, x: m.first(x.float() / 255), lambda: ((normal(4, 8).abs() * 50).to(torch.uint8),)),
}


@pytest.mark.parametrize("name", thinned(CALLS, 2))
def test_inputs(name: str) -> None:
    function, call = CALLS[name]
    audit = held(lambda: (model_of(function), (call(), {})), formats=a_format(name))
    assert not any("keeps state" in warning for warning in audit.warnings)


def doubled(m: Any, x: Any, by: Any = 2.0) -> Tensor:
    x *= by
    return m.first(torch.from_numpy(x))


def test_an_array_that_is_written_comes_back() -> None:
    given = normal(4, 8).numpy().copy()
    audit = auditor.audit(model_of(doubled), (given,), kwargs={"by": np.float32(3)}, device="cpu")
    assert audit.plans["autocast_fp16"].is_verified
    assert np.array_equal(given, normal(4, 8).numpy())


STATE: dict[str, tuple[Callable[..., Any], Callable[[], Tensor]]] = {
    "parameter of its own class": (lambda m, x: x @ m.held, lambda: Weight(normal(8, 8))),
    "one entry for all": (lambda m, x: m.first(x) * m.held, lambda: torch.tensor(2.0).expand(8)),
}


@pytest.mark.parametrize("name", STATE)
def test_state(name: str) -> None:
    function, make = STATE[name]
    held(lambda: (model_of(function, held=make()), ((normal(4, 8),), {})), formats=a_format(name))


@pytest.mark.parametrize("function", [lambda m, x: m.first(x), lambda m, x: m.first(x) * m.held.shape[0]])
def test_a_buffer_without_values(function: Callable[..., Any]) -> None:
    audit = auditor.audit(model_of(function, held=torch.empty(8, device="meta")), (normal(4, 8),), device="cpu")
    assert audit.plans["autocast_fp16"].is_verified


# What forwards return: containers torch cannot flatten, parts that are no tensors, views, integers, and zeros.

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class OutputFields:
    a: Tensor
    b: Any = None
    name: str = "x"


class Named(OrderedDict[str, Tensor]):
    pass


class Circular:
    def __init__(self, a: Tensor) -> None:
        self.a, self.itself = a, self


def stages(m: Any, x: Tensor) -> Iterator[Tensor]:
    for layer in (m.first, m.second):
        x = layer(x)
        yield x


def mixture(m: Any, x: Tensor) -> Any:
    return MixtureSameFamily(Categorical(logits=m.first(x)), Normal(m.second(x), m.first(x).exp()))


MODELS: dict[str, Callable[..., Any]] = {
    "dataclass": lambda m, x: OutputFields(m.first(x), [m.second(x)]),
    "namedtuple": lambda m, x: Pair(m.first(x), None),
    "OrderedDict of its own": lambda m, x: Named(a=m.first(x)),
    "generator": stages,
    "list of dicts": lambda m, x: [{"a": layer(x), "b": 0.5, "c": "text"} for layer in (m.first, m.second)],
    "distribution": mixture,
    "points at itself": lambda m, x: Circular(m.first(x)),
    "number beside": lambda m, x: (m.first(x), m.second(x).mean().item()),
    "array beside": lambda m, x: (m.first(x), m.second(x).detach().numpy()),
    "scalar": lambda m, x: m.first(x).sum(),
    "nothing left": lambda m, x: m.first(x)[m.second(x).sum(1) > 1e6],
    "integers": lambda m, x: m.first(x).argmax(-1),
    "bytes": lambda m, x: (m.first(x).sigmoid() * 255).to(torch.uint8),
    "views of the input": lambda m, x: (m.first(x), x.view(2, 16), x),
    "weight": lambda m, x: (m.first(x), m.first.weight),
    "strided": lambda m, x: (m.first(x)[:, ::2], m.first(x)[:1].expand(4, 8), m.first(x).t()),
    "infinite": lambda m, x: m.first(x).masked_fill(x > 0, float("-inf")),
    "in half": lambda m, x: m.first(x).half(),
    "in double": lambda m, x: m.first(x).double(),
    "module beside": lambda m, x: (m.first(x), m.second, lambda: m.second(x)),
}


@pytest.mark.parametrize("name", thinned(MODELS))
def test_it_ends_in_an_audit_and_verified_plans_hold(name: str) -> None:
    held(lambda: (model_of(MODELS[name]), ((normal(4, 8),), {})), formats=a_format(name))


def head() -> nn.Linear:
    layer = linear(8, 8)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize("alone", [True, False])
def test_an_answer_of_zeros_says_that_its_error_says_nothing(alone: bool) -> None:
    def run(m: Any, x: Tensor) -> Any:
        zeros = m.head(m.first(x))
        return zeros if alone else (zeros, m.second(x))

    audit = held(lambda: (model_of(run, head=head()), ((normal(4, 8),), {})))
    assert any("outputs are zero in FP32" in warning for warning in audit.live.warnings) is alone


# A loop that waits for two numbers to agree may never end in half: that costs the plan, not the audit.


def fixed_point(m: Any, x: Tensor) -> Tensor:
    """x -> z with z = tanh(Wz + x), iterated until FP32 cannot tell it from its successor."""
    z = torch.zeros_like(x)
    while True:
        after = torch.tanh(m.lin(z) + x)
        if (after - z).norm() < 1e-6 and after.dtype is torch.float32:  # in BF16 it may go to and fro for ever
            return after
        z = after


def test_the_audit_ends() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(fixed_point, lin=nn.Linear(8, 8))
        nn.init.orthogonal_(model.lin.weight, gain=0.5)
        x = torch.randn(2, 8)
        found = auditor.audit(model, x, formats=("bf16",), strategies=("cast",), device="cpu")
    assert "in this format a loop takes longer or never ends" in str(found.baselines["cast_bf16"].failure)
    plan = found.plans["cast_bf16"]
    assert plan.scopes[""].precision != "bf16" or not plan.is_verified


def suppressed(m: Any, x: Tensor) -> Tensor:
    """Boxes by greedy suppression in Python: the loop takes most of the operations, and no output is made of them."""
    scores, boxes = m.score(x)[:, 0], m.box(x).cumsum(0)
    kept, order = [], scores.argsort(descending=True)
    while order.numel():
        first, others = order[0], order[1:]
        kept.append(first.item())
        near = (boxes[others] - boxes[first]).square().sum(-1).sqrt() < 1e-6
        order = others[near.logical_not()]
    return scores[torch.tensor(kept)].sum() + boxes.mean(0)


def build(rows: int) -> tuple[nn.Module, tuple[tuple[Tensor], dict[str, Any]]]:
    torch.manual_seed(0)
    return Model(suppressed, score=nn.Linear(8, 1), box=nn.Linear(8, 2)), ((torch.randn(rows, 8),), {})


def test_a_loop_that_leaves_nothing_in_the_recording_ends_when_it_ends() -> None:
    audit = held(lambda: build(180), formats=("fp16",), strategies=("autocast",))
    assert audit.plans["autocast_fp16"].is_verified
    assert audit.plans["autocast_fp16"].low_precision_flops == 1.0
    assert len(audit.nodes) < 100


def test_as_many_operations_as_the_inputs_take_that_a_plan_is_verified_on() -> None:
    model, (few, _) = build(4)
    many = build(180)[1][0]
    audit = auditor.audit(model, [few, many], formats=("fp16",), strategies=("autocast",), device="cpu")
    assert audit.baselines["autocast_fp16"].failure is None
    assert audit.plans["autocast_fp16"].is_verified
