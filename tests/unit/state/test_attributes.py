"""What hangs on objects by name: attributes, slots, hooks and classes are read, changed and written back."""

from __future__ import annotations

import logging
import threading
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auditor.state.attributes import CLASS, HOOKS, MODULE, OBJECT, is_open, own_classes, slots


class Plain:
    shared: Any = 1

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


class Slotted:
    __slots__ = ("x", "y")


class Deeper(Slotted):
    __slots__ = ("z",)


class Colour(Enum):
    RED = 1


class Other(Plain):
    pass


def test_attributes_come_back_in_their_order() -> None:
    owner = Plain()
    before = OBJECT.read(owner)
    kept = owner.b
    owner.b, owner.c = [3], 4
    del owner.a
    OBJECT.write(owner, before)
    assert list(vars(owner)) == ["a", "b"]
    assert owner.a == 1
    assert owner.b is kept


def test_an_object_that_changed_its_class_changes_back() -> None:
    owner = Plain()
    before = OBJECT.read(owner)
    owner.__class__ = Other
    OBJECT.write(owner, before)
    assert type(owner) is Plain


def test_slots_of_all_bases_set_deleted_and_unset() -> None:
    owner = Deeper()
    owner.x, owner.z = 1, 3  # y is not set
    (kind,) = slots(Deeper)
    before = kind.read(owner)
    owner.y, owner.z = 2, 4
    del owner.x
    kind.write(owner, before)
    assert (owner.x, owner.z) == (1, 3)
    assert not hasattr(owner, "y")
    assert slots(Plain) == []


def test_a_class_keeps_what_it_had_and_loses_what_it_got() -> None:
    class Cached:
        table: dict[int, int] | None = None

    before = CLASS.read(Cached)
    Cached.table = {}
    Cached.calls = 1  # type: ignore[attr-defined]
    CLASS.write(Cached, before)
    assert Cached.table is None
    assert not hasattr(Cached, "calls")


def test_hooks_come_back_and_what_they_are_is_opened() -> None:
    layer = nn.Linear(1, 1)
    calls: list[str] = []
    handle = layer.register_forward_hook(lambda *_: calls.append("old"))
    before = HOOKS.read(layer)
    handle.remove()
    layer.register_forward_hook(lambda *_: calls.append("new"))
    HOOKS.write(layer, before)
    layer(torch.ones(1))
    assert calls == ["old"]
    assert [item for item in HOOKS.leads(before) if callable(item)] == [*layer._forward_hooks.values()]
    hooks = layer._forward_hooks
    assert all(value is not hooks for value in MODULE.leads(MODULE.read(layer)))


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Plain, True),
        (nn.Linear, True),
        (torch.Tensor, True),
        (SimpleNamespace, True),
        (torch.optim.SGD, True),
        (torch.fx.Graph, False),
        (threading.Thread, False),
        (logging.Logger, False),
        (Colour, False),
        (type, False),
    ],
)
def test_whose_attributes_may_be_a_model_s_state(cls: type, expected: bool) -> None:
    assert is_open(cls) is expected


def test_classes_of_the_user_s_own() -> None:
    class Mine(nn.Linear):
        pass

    assert list(own_classes(Mine)) == [Mine]
    assert list(own_classes(Other)) == [Other, Plain]
