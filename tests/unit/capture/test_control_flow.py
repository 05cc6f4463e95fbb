"""Whatever Python does between the operations: what ran is in the recording, and what chose the path is held."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.replaying import Model, kinds, linear, operations, replayed
from tests.support.subjects import nodes_by_op, normal

X = normal(6, 4)


SELECTIONS: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda x: x[torch.where(x.sum(-1) > 0)[0]],
    "nonzero": lambda x: x[(x.sum(-1) > 0).nonzero(as_tuple=True)],
    "nonzero of floats": lambda x: x[x.relu().nonzero(as_tuple=True)],
    "argwhere": lambda x: x[torch.argwhere(x > 0)[:, 0]],
    "masked_select": lambda x: x.masked_select(x > 0) * 2,
    "mask": lambda x: x[x > 0] * 2,
    "mask over rows and an index": lambda x: x[x.sum(-1) > 0][:, [0, 2]],
    "write under a mask": lambda x: x.clone().index_put_((x > 0,), x[x > 0].exp()),
    "unique": lambda x: torch.unique((x * 2).round())[:4] * x,
    "unique_consecutive": lambda x: torch.unique_consecutive((x > 0).long().flatten()) * x.sum(),
    "repeat_interleave": lambda x: x.repeat_interleave((x.sum(-1) > 0).long() + 1, dim=0) * 2,
    "tensor_split": lambda x: [y.exp() for y in x.tensor_split((x[:3].sum(-1) > 0).long().cumsum(0))],
    "bincount": lambda x: torch.bincount(x.argmax(-1)) * x.sum(),
    "one_hot": lambda x: nn.functional.one_hot(x.argmax(-1)) * x.sum(),
    "tolist": lambda x: x[: sum(x.argmax(-1).tolist()) % 5 + 1] * 2,
    "numpy": lambda x: x[: int(x.detach().numpy().shape[0]) - 1] * 2,
    "bool": lambda x: x * 2 if (x > 0).any() else x / 2,
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_chooses_a_shape_is_held_in_a_low_run(name: str) -> None:
    """Scores that BF16 rounds to zero choose other entries there, and the replay must not care."""

    model = Model(lambda self, x: SELECTIONS[name](self.layer(x)), layer=linear(4, 4))
    found = replayed(model, X, method="path")
    with torch.no_grad():
        values = found.bind(model, ((X,), {}))
        low = [v + 1 if p.kind == "input" else v for p, v in zip(found.placeholders, values, strict=True)]
        found.graph_module(*low)  # every choice may come out otherwise here


def test_masks_that_no_rounding_can_change_are_not_held() -> None:
    found = replayed(Model(lambda self, x, mask: x[mask].exp()), X, X[:, 0] > 0, method="path")
    assert kinds(found) == ["input", "input"]


def test_values_that_no_input_has_a_part_in_choose_no_path() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x * float(self.scale) if bool(self.scale > 0) and self.sizes.tolist() == [1, 2] else x

    replayed(Model(forward, scale=torch.tensor(2.0), sizes=torch.tensor([1, 2])), X)


def test_a_loop_until_a_value_is_reached() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = self.layer(x) * 0.5
        return x

    found = replayed(Model(forward, layer=linear(4, 4)), X, method="path")
    assert len(nodes_by_op(found, "linear")) > 1
    assert "norm" not in operations(found)


def test_a_cond_runs_the_branch_that_it_takes() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.up(y).relu(), lambda y: self.down(y).sin(), (x,))

    model = Model(forward, up=linear(4, 4), down=linear(4, 4))
    for x, owner, operation in ((X.abs(), "up", "relu"), (-X.abs(), "down", "sin")):
        found = replayed(model, x, method="path")
        assert [node.owner for node in nodes_by_op(found, "linear")] == [owner]
        assert operation in operations(found)


def test_while_loops_of_torch() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def forward(self: Any, x: Tensor) -> Tensor:
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.5 + 1), (torch.tensor(0), x))[1]

    assert operations(replayed(Model(forward), X)).count("mul") == 3


def test_map_and_scan_of_torch() -> None:
    from torch._higher_order_ops.map import map as over_rows

    found = replayed(Model(lambda self, x: over_rows(lambda row, w: (row * w).exp(), x, torch.ones(4))), X)
    assert "exp" in operations(found)
