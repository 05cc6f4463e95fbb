"""What a model consists of, however it is linked, and whatever its class says it consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from auditor.state.members import modules_of, named_modules, named_parameters, named_tensors, parameters_of, size_of


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

    parameters = buffers = modules = children = named_parameters  # type: ignore[assignment]


def test_modules_as_torch_names_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert named_modules(model) == list(model.named_modules(remove_duplicate=False))
    assert modules_of(model) == list(model.modules())
    assert [name for name, _ in named_tensors(model)] == [name for name, _ in model.named_parameters()]


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


def test_weights_of_scripts_count_loaded_or_not() -> None:
    assert size_of(torch.jit.script(nn.Linear(2, 3))) == 9
