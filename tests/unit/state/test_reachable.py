"""What a model and its inputs lead to, and what is said of the parts that do not come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from auditor.state.reachable import Reachable
from auditor.state.storages import Role


@dataclass
class Config:
    scale: float
    tables: dict[str, list[Tensor]]


class Net(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.config = Config(1.0, {"rows": [torch.ones(3)]})
        self.itself = [self]  # a circle


def test_everything_that_hangs_on_a_model_comes_back() -> None:
    model = Net()
    found = Reachable(model, [])
    row = model.config.tables["rows"][0]
    model.config.scale = 2.0
    model.config.tables["rows"].append(torch.zeros(1))
    row.zero_()
    model.weight.data.mul_(5)
    model.mean.add_(1)
    model.extra = 1
    Net.calls = 7
    assert found.restore() == []
    assert (model.config.scale, model.config.tables["rows"], row.tolist()) == (1.0, [row], [1, 1, 1])
    assert (model.weight.tolist(), model.mean.tolist(), Net.calls) == ([1, 1], [0, 0], 0)
    assert not hasattr(model, "extra")


def test_holders_are_searched_too() -> None:
    batch: dict[str, Any] = {"x": [torch.ones(1)]}
    found = Reachable(nn.Identity(), [batch])
    batch["x"][0].zero_()
    batch["x"].clear()
    assert found.restore() == []
    assert batch["x"][0].tolist() == [1]


def test_roles_decide_what_is_copied_at_once() -> None:
    asked: dict[int, Role] = {}

    class Watching(Reachable):
        def _open_tensor(self, tensor: Tensor) -> Any:
            state = super()._open_tensor(tensor)
            watch = state.watch

            def heard(storages: Any, role: Role) -> None:
                asked[id(tensor)] = role
                watch(storages, role)

            state.watch = heard  # type: ignore[method-assign]
            return state

    model, x = Net(), torch.ones(1)
    model.weight.grad = torch.ones(2)
    Watching(model, [x])
    row = model.config.tables["rows"][0]
    roles = [asked[id(tensor)] for tensor in (model.weight, model.weight.grad, model.mean, row, x)]
    assert roles == [Role.PARAMETER, Role.PARAMETER, Role.BUFFER, Role.PLAIN, Role.PLAIN]


def test_one_that_cannot_be_put_back_is_named_and_keeps_none_of_the_others() -> None:
    x, holder = torch.ones(2), [1]
    found = Reachable(nn.Identity(), [holder, x])

    def broken(owner: list[Any], held: list[Any]) -> None:
        raise TypeError("a list that refuses")

    for one in found._contents:
        if one.owner is holder:
            object.__setattr__(one, "kind", type(one.kind)(one.kind.read, broken, one.kind.leads))
    holder.append(2)
    x.zero_()
    assert found.restore() == ["TypeError: a list that refuses"]
    assert x.tolist() == [1, 1]
