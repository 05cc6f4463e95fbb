"""Operations whose results take their shape from values: which argument's, if any."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auditor.capture.functional import shape_from

aten = torch.ops.aten
X, MASK, COUNTS = torch.ones(2, 2), torch.tensor([True, False]), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("op", "args", "chooser"),
    [
        (aten.nonzero.default, (X,), X),
        (aten.argwhere.default, (X,), X),
        (aten.where.default, (X,), X),
        (aten.unique_dim.default, (X, 0), X),
        (aten.masked_select.default, (X, MASK), MASK),
        (aten.repeat_interleave.self_Tensor, (X, COUNTS, 0), COUNTS),
        (aten.repeat_interleave.Tensor, (COUNTS,), COUNTS),
        (aten.index.Tensor, (X, [MASK]), MASK),
        (aten.index.Tensor, (X, [None, MASK]), MASK),
        (aten.index_put_.default, (X, [MASK], torch.ones(1, 2)), MASK),
        (aten.one_hot.default, (COUNTS,), COUNTS),
        (aten.one_hot.default, (COUNTS, -1), COUNTS),
    ],
)
def test_the_argument_that_chooses(op: Any, args: tuple[Any, ...], chooser: torch.Tensor) -> None:
    (found,) = shape_from(op, args)
    assert found is chooser


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (X, X)),
        (aten.where.self, (MASK, X, X)),
        (aten.index.Tensor, (X, [COUNTS])),  # as many entries as there are indices
        (aten.index_put_.default, (X, [MASK], torch.tensor(3.0))),  # one number fits any choice
        (aten.one_hot.default, (COUNTS, 5)),
        (aten.repeat_interleave.self_int, (X, 2)),
        (aten.masked_fill.Scalar, (X, MASK, 0.0)),
    ],
)
def test_shapes_that_are_given(op: Any, args: tuple[Any, ...]) -> None:
    assert shape_from(op, args) == []
