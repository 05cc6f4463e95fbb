from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._higher_order_ops.cond import cond_op

from auditor.isolation.eager import cond, eager_branches, uncompiled, while_loop
from tests.support.subjects import normal

X = normal(8, 4)


@pytest.mark.parametrize("condition", [lambda row: row.sum() > 0, lambda row: X.sum() > 0])
@pytest.mark.parametrize("nested", [False, True])
def test_a_cond_of_every_row_is_what_torch_itself_makes_of_it(
    condition: Callable[[Tensor], Tensor], nested: bool
) -> None:
    def rows(x: Tensor) -> Tensor:
        found: Tensor = torch.vmap(lambda row: torch.cond(condition(row), torch.sin, torch.cos, (row,)))(x)
        return found

    def all_of(x: Tensor) -> Tensor:
        return torch.vmap(rows)(x.reshape(2, 4, 4)) if nested else rows(x)

    # Of all rows at once, as in the transform: of one row alone, a sine may be another kernel's.
    holds, x = torch.stack([condition(row) for row in X]), X.reshape(2, 4, 4) if nested else X
    expected = torch.where(holds.view(*x.shape[:-1], 1), x.sin(), x.cos())
    with uncompiled():
        assert torch.equal(all_of(X), expected)


def test_a_branch_may_return_any_tree() -> None:
    def branches(row: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.cond(
            row.sum() > 0, lambda r: {"a": r, "b": r * 2}, lambda r: {"a": -r, "b": r * 3}, (row,)
        )
        return found

    with uncompiled():
        found = torch.vmap(branches)(X)
    positive = X.sum(1, keepdim=True) > 0
    assert torch.equal(found["a"], torch.where(positive, X, -X))
    assert torch.equal(found["b"], torch.where(positive, X * 2, X * 3))


def test_the_rule_of_torch_comes_back() -> None:
    before = cond_op.functorch_table[TransformType.Vmap]
    inside = []

    def fails() -> None:
        with eager_branches():
            inside.append(cond_op.functorch_table[TransformType.Vmap])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert inside != [before]
    assert cond_op.functorch_table[TransformType.Vmap] is before


def test_the_branch_that_is_meant_and_a_loop_to_its_end() -> None:
    assert cond(torch.tensor(False), torch.sin, torch.cos, (X,)).equal(X.cos())
    (found,) = while_loop(lambda x: bool(x < 10), lambda x: (x * 2,), (torch.ones(()),))
    assert found == 16
