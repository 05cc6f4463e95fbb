"""What a model consists of, however it is linked and wrapped, whatever its class says, and what it stores low."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from auditor.isolation.members import (
    modules_of,
    named_modules,
    named_parameters,
    named_tensors,
    parameters_of,
    raise_in_place,
    rename_scopes,
    size_of,
    stored_low,
    unwrap_model,
    without_wrappers,
)
from tests.support.subjects import normal


class Linked(nn.Module):
    """A child that knows its parent, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 3)
        self.child.parent = self
        self.again = self.child
        self.norm = nn.BatchNorm1d(3)


class Says(nn.Module):
    """Claims to hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(())

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(())

    parameters = buffers = modules = children = named_parameters


def test_a_link_to_the_parent_ends_there_and_every_other_name_counts() -> None:
    model = Linked()
    assert [path for path, _ in named_modules(model)] == ["", "child", "again", "norm"]
    assert modules_of(model) == [model, model.child, model.norm]
    names = ["child.weight", "child.bias", "again.weight", "again.bias", "norm.weight", "norm.bias"]
    assert [name for name, _ in named_parameters(model)] == names
    assert [name for name, _ in named_tensors(model)][6:] == [f"norm.{name}" for name in model.norm._buffers]
    assert size_of(model) == 2 * 3 + 3 + 3 + 3


def test_what_the_class_says_of_itself_does_not_count() -> None:
    model = Says()
    assert [id(p) for p in parameters_of(model)] == [id(model.layer.weight), id(model.layer.bias)]
    assert modules_of(model) == [model, model.layer]


class Holds(nn.Module):
    """A weight used twice, buffers of several dtypes, and tensors that it did not register."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2).half())
        self.register_buffer("coded", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.ones(2).double())
        self.register_buffer("none", None)
        self.tables = {"cos": [torch.ones(2).half(), torch.ones(2)]}


def test_low_tensors_are_found_once() -> None:
    model = Holds()
    found = stored_low(model)
    assert [id(x) for x in found] == [id(x) for x in (model.first.weight, model.first.bias, model.scale)]
    further = stored_low(model, attributes=True)
    assert [id(x) for x in further[3:]] == [id(model.tables["cos"][0])]


def test_raised_tensors_are_the_same_objects_with_the_same_values() -> None:
    model = Holds()
    before = [(x, x.detach().clone()) for x in stored_low(model)]
    raise_in_place([x for x, _ in before])
    assert stored_low(model) == []
    assert model.second.weight is model.first.weight is before[0][0]
    for x, value in before:
        assert x.dtype is torch.float32
        assert torch.equal(x, value.float())
    assert model.wide.dtype is torch.float64


def test_what_shared_a_storage_shares_one_again() -> None:
    flat = normal(12).bfloat16()
    expected = flat.float()
    head, tail, turned = flat[:6], flat[6:], flat.reshape(3, 4).t()
    raise_in_place([head, tail, turned, flat])
    assert torch.equal(torch.cat((head, tail)), expected)
    assert torch.equal(turned, expected.reshape(3, 4).t())
    head[1] = 7
    assert turned[1, 0] == flat[1] == 7


class OfOnesOwn(nn.Module):
    """A module that holds another under a wrapper's name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)


class DataParallel(OfOnesOwn):
    """By its name alone."""


def test_wrappers_of_wrappers_are_taken_off() -> None:
    inner = nn.Linear(2, 2)
    assert unwrap_model(torch.compile(inner)) is inner
    assert unwrap_model(nn.DataParallel(torch.compile(inner))) is inner
    assert unwrap_model(torch.compile(nn.DataParallel(inner))) is inner


def test_scopes_follow_what_is_wrapped_inside() -> None:
    assert without_wrappers("a._orig_mod.b.module.c") == "a.b.c"
    assert without_wrappers("_orig_mod") == ""
    assert rename_scopes({"": 0, "a": 1, "a.b": 2}, {"", "a", "a._orig_mod", "a._orig_mod.b"}) == {
        "": 0,
        "a": 1,
        "a._orig_mod.b": 2,
    }
    assert rename_scopes({"a": 1, "a.module.b": 2}, {"", "a", "a.b"}) == {"a": 1, "a.b": 2}
    assert rename_scopes({"a.module": 1}, {"", "a", "a.module"}) == {"a.module": 1}
    assert rename_scopes({"gone": 1}, {"", "a"}) == {"gone": 1}
