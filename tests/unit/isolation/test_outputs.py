"""Whatever a forward returns, its tensors are found, in an order that is the same every time."""

import itertools
from collections import OrderedDict, UserDict, UserList, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, MultivariateNormal, Normal
from torch.nn.utils.rnn import pack_sequence

from auditor.isolation.outputs import tensor_outputs

A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)
Pair = namedtuple("Pair", "first second")


@dataclass
class Fields:
    first: Any
    second: Any
    note: str = "text"


@dataclass(frozen=True, slots=True)
class Slotted:
    first: Any
    second: Any


@dataclass
class Late:
    """A field that is not set, and an attribute that is no field."""

    missing: Any = field(init=False)
    first: Any = None


class Table(OrderedDict[str, Any]):
    """As the libraries' output classes are."""


class Several(list[Any]):
    """A list of the user's own."""


class Triple(Pair):
    """A class of the user's own above a named tuple."""


class Plain:
    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


class WithSlots:
    __slots__ = ("_first", "never", "second")

    def __init__(self) -> None:
        self._first, self.second = A, B


class Kind(Enum):
    ONE = A


def late() -> Late:
    made = Late(first=A)
    made.more = B
    return made


def set_in_another_order() -> Fields:
    made = Fields.__new__(Fields)
    made.second, made.first = B, A
    return made


def cycle() -> Plain:
    made = Plain(first=A)
    made.itself, made.second = made, [made, B, {"again": made}]
    return made


def list_cycle() -> list[Any]:
    made: list[Any] = [A]
    made += [made, B]
    return made


FOUND: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
    "tensor": (lambda: A, [A]),
    "nothing": (lambda: None, []),
    "tuple": (lambda: (A, [B, {"x": C}], 1, "text"), [A, B, C]),
    "twice": (lambda: (A, A, {"x": A}), [A, A, A]),
    "list twice": (lambda: [[A, B]] * 2, [A, B, A, B]),
    "named tuple": (lambda: Pair(A, B), [A, B]),
    "above a named tuple": (lambda: Triple(A, B), [A, B]),
    "dataclass": (lambda: Fields(B, [A, None]), [B, A]),
    "dataclass set in another order": (set_in_another_order, [A, B]),
    "dataclass with slots": (lambda: Slotted(B, {"x": A}), [B, A]),
    "dataclass with more": (late, [A, B]),
    "dataclass in a dict": (lambda: {"b": Fields(A, B), "a": C}, [A, B, C]),
    "namespace": (lambda: SimpleNamespace(z=A, a=Fields(B, C)), [A, B, C]),
    "ordered dict": (lambda: OrderedDict(z=A, a=B), [A, B]),
    "above an ordered dict": (lambda: Table(z=A, a=(B, C)), [A, B, C]),
    "mapping": (lambda: UserDict(z=A, a=B), [A, B]),
    "sequence": (lambda: UserList([A, B]), [A, B]),
    "above a list": (lambda: Several([A, Fields(B, C)]), [A, B, C]),
    "object": (lambda: Plain(second=B, _first=A, name="text"), [B, A]),
    "object with slots": (WithSlots, [A, B]),
    "object twice": (lambda: [(made := Plain(x=A)), made], [A]),
    "object with a cycle": (cycle, [A, B]),
    "list with a cycle": (list_cycle, [A, B]),
    "generator": (lambda: (x for x in (A, B)), [A, B]),
    "map in a list": (lambda: [map(torch.Tensor.clone, (A, B)), C], [A, B, C]),
    "parameter": (lambda: [nn.Parameter(A)], [A]),
    "packed sequence": (lambda: pack_sequence([B, A]), [torch.ones(3), torch.tensor([2, 1])]),
    "normal": (lambda: Normal(B, 2 * B), [B, 2 * B]),
    "categorical": (lambda: Categorical(logits=C.log_softmax(-1)), [C.log_softmax(-1)]),
    "nested distribution": (lambda: Independent(Normal(B, 3 * B), 1), [B, 3 * B]),
    "multivariate normal": (lambda: MultivariateNormal(B, torch.eye(2)), [torch.eye(2), B]),
    "mixture": (
        lambda: MixtureSameFamily(Categorical(logits=B.log_softmax(-1)), Normal(B, 2 * B)),
        [B.log_softmax(-1), B, 2 * B],
    ),
    "module": (lambda: [nn.Linear(2, 2), Plain(model=nn.Linear(2, 2), x=A)], [A]),
    "what holds none": (
        lambda: [
            *("text", b"text", Path("x"), 1.5, 2j, range(10**12), torch.float32, torch.Size([1]), torch.device("cpu")),
            *(Plain, Plain.__init__, torch, Kind, open, itertools.count(), {1, 2}, slice(0, 1), object()),
        ],
        [],
    ),
}


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("make", "expected"), FOUND.values(), ids=FOUND)
def test_tensors_are_found_in_order(make: Callable[[], Any], expected: list[Tensor]) -> None:
    assert same(tensor_outputs(make()), expected)
    assert same(tensor_outputs([make()]), expected)


def test_a_key_value_cache_is_memory_for_the_next_call() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    cache = cache_utils.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    logits = torch.zeros(1, 3)
    assert [x is logits for x in tensor_outputs({"logits": logits, "past_key_values": cache})] == [True]


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (A, ("output",)),
        ((A, B), ("0", "1")),
        ([A], ("0",)),
        ({"boxes": A, "masks": {"low": B, 3: C}}, ("boxes", "masks.low", "masks.3")),
        ([{"boxes": A}, {"boxes": B}], ("0.boxes", "1.boxes")),
        (Pair(A, [B]), ("first", "second.0")),
        (Triple(A, B), ("first", "second")),
        (Fields(A, {"x": B}), ("first", "second.x")),
        (Slotted(A, B), ("first", "second")),
        (SimpleNamespace(z=A, a=B), ("z", "a")),
        (Table(logits=A, hidden=(B, C)), ("logits", "hidden.0", "hidden.1")),
        (UserDict(x=A), ("x",)),
        (iter([A, B]), ("0", "1")),
        ((None, A), ("1",)),
        ((A, A), ("0", "1")),
        (torch.max(torch.ones(2, 2), 0), ("0", "1")),
    ],
)
def test_every_output_goes_by_its_name_in_the_return(output: Any, names: tuple[str, ...]) -> None:
    assert tensor_outputs(output).names == names
