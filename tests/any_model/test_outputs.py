"""What forwards return: containers torch cannot flatten, parts that are no tensors, views, integers, and zeros."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import auditor
from auditor.errors import CaptureError
from tests.any_model.holding import held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Fields:
    a: Tensor
    b: Any = None
    name: str = "x"


@dataclass(slots=True)
class Slots:
    a: Tensor


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
    "dataclass": lambda m, x: Fields(m.first(x), [m.second(x)]),
    "slots": lambda m, x: Slots(m.first(x)),
    "namedtuple": lambda m, x: Pair(m.first(x), None),
    "namespace": lambda m, x: SimpleNamespace(a=m.first(x), b="text"),
    "OrderedDict of its own": lambda m, x: Named(a=m.first(x)),
    "generator": stages,
    "list of dicts": lambda m, x: [{"a": layer(x), "b": 0.5, "c": "text"} for layer in (m.first, m.second)],
    "mixed keys": lambda m, x: {"a": m.first(x), 1: m.second(x), ("b", "c"): m.first(x)},
    "distribution": mixture,
    "points at itself": lambda m, x: Circular(m.first(x)),
    "number beside": lambda m, x: (m.first(x), m.second(x).mean().item()),
    "array beside": lambda m, x: (m.first(x), m.second(x).detach().numpy()),
    "scalar": lambda m, x: m.first(x).sum(),
    "empty beside": lambda m, x: (m.first(x), x[:0]),
    "nothing left": lambda m, x: m.first(x)[m.second(x).sum(1) > 1e6],
    "integers": lambda m, x: m.first(x).argmax(-1),
    "truths": lambda m, x: m.first(x) > 0,
    "bytes": lambda m, x: (m.first(x).sigmoid() * 255).to(torch.uint8),
    "views of the input": lambda m, x: (m.first(x), x.view(2, 16), x),
    "weight": lambda m, x: (m.first(x), m.first.weight),
    "twice": lambda m, x: (lambda y: (y, y, y.view(-1)))(m.first(x)),
    "strided": lambda m, x: (m.first(x)[:, ::2], m.first(x)[:1].expand(4, 8), m.first(x).t()),
    "infinite": lambda m, x: m.first(x).masked_fill(x > 0, float("-inf")),
    "in half": lambda m, x: m.first(x).half(),
    "in double": lambda m, x: m.first(x).double(),
    "module beside": lambda m, x: (m.first(x), m.second, lambda: m.second(x)),
}


def model_of(function: Callable[..., Any], **state: Any) -> nn.Module:
    return Model(function, first=linear(8, 8), second=linear(8, 8, seed=1), **state).eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_ends_in_an_audit_and_verified_plans_hold(name: str) -> None:
    held(lambda: (model_of(MODELS[name]), ((normal(4, 8),), {})))


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
    assert any("all zeros" in warning for warning in audit.live.warnings) is alone


@pytest.mark.parametrize(
    "read", [lambda y: y.sum().item(), Tensor.tolist, lambda y: y.detach().numpy(), lambda y: None]
)
def test_no_tensor_returned_is_one_line(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="returns no tensor") as raised:
        auditor.audit(model_of(lambda m, x: read(m.first(x))), (normal(4, 8),), device="cpu")
    assert raised.value.slug == "nothing-to-audit"
