"""Containers and generators put back in place: the same objects, in the same order, in the same container."""

from __future__ import annotations

import random
import weakref
from array import array
from collections import OrderedDict, UserList, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from auditor.state.attributes import HOOKS, MODULE, OBJECT
from auditor.state.contents import content, kinds_of


class Refusing(OrderedDict[str, Any]):
    """As the outputs of transformers: it can be read, not written."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read only")


def refusing() -> Refusing:
    found = Refusing()
    OrderedDict.__setitem__(found, "a", 1)
    return found


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1, 2, 3], lambda x: x.reverse()),
    "a longer list": (lambda: [1], lambda x: x.append(2)),
    "dict": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
    "a dict with a default": (lambda: defaultdict(list, a=[1]), lambda x: x["b"]),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    "a dict that refuses": (refusing, lambda x: OrderedDict.__setitem__(x, "a", 2)),
    "set": (lambda: {1, 2}, lambda x: x.discard(1)),
    "deque": (lambda: deque([1, 2, 3], maxlen=3), lambda x: x.append(4)),
    "array": (lambda: array("d", [1.0, 2.0]), lambda x: x.pop()),
    "bytes": (lambda: bytearray(b"abc"), lambda x: x.clear()),
    "numbers": (lambda: np.arange(3.0), lambda x: x.fill(7)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_containers(name: str) -> None:
    make, change = CHANGES[name]
    owner, expected = make(), make()
    held = [content(owner, kind) for kind in kinds_of(type(owner))]
    assert len(held) >= 1
    change(owner)
    assert list(owner) != list(expected) or (isinstance(owner, dict) and [*owner.items()] != [*expected.items()])
    for one in held:
        one.restore()
    assert list(owner) == list(expected)
    if isinstance(owner, dict):
        assert [*owner.items()] == [*expected.items()]


class Key:
    """Can be referred to weakly."""


def test_containers_that_hold_weakly() -> None:
    kept, other = Key(), Key()
    by_key: weakref.WeakKeyDictionary[Key, int] = weakref.WeakKeyDictionary({kept: 1})
    by_value: weakref.WeakValueDictionary[int, Key] = weakref.WeakValueDictionary({1: kept})
    members = weakref.WeakSet([kept])
    held = [content(owner, kind) for owner in (by_key, by_value, members) for kind in kinds_of(type(owner))]
    by_key[other], by_key[kept], by_value[2] = 2, 3, other
    members.remove(kept)
    members.add(other)
    for one in held:
        one.restore()
    assert [*by_key.items()] == [(kept, 1)]
    assert [*by_value.items()] == [(1, kept)]
    assert [*members] == [kept]


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (random.Random(1), lambda g: g.random()),
        (np.random.RandomState(1), lambda g: g.rand()),
        (np.random.default_rng(1), lambda g: g.random()),
        (torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g).item()),
    ],
    ids=["random", "RandomState", "numpy", "torch"],
)
def test_generators_draw_the_same_again(generator: Any, draw: Callable[[Any], float]) -> None:
    (kind,) = kinds_of(type(generator))
    held = content(generator, kind)
    first, second = draw(generator), draw(generator)
    assert first != second
    held.restore()
    assert draw(generator) == first


def test_the_objects_held_are_the_next_to_be_opened() -> None:
    inner: list[int] = []
    (kind,) = kinds_of(tuple)
    assert list(content((inner, 3), kind).children) == [inner, 3]
    (numbers,) = kinds_of(np.ndarray)
    assert list(content(np.ones(2), numbers).children) == []  # a copy of them is nobody's state


def test_what_was_left_alone_is_not_written() -> None:
    class Counted(list[int]):
        writes = 0

        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError(name)

    owner = Counted([1])
    for kind in kinds_of(Counted):
        content(owner, kind).restore()
    assert owner == [1]


def test_an_array_that_cannot_change_is_not_copied() -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    (kind,) = kinds_of(np.ndarray)
    assert content(fixed, kind).held == []


def test_by_what_classes_are_read() -> None:
    assert kinds_of(nn.Linear)[:2] == (MODULE, HOOKS)
    assert kinds_of(SimpleNamespace) == (OBJECT,)
    assert len(kinds_of(UserList)) == 1
    assert kinds_of(type(random)) == ()
