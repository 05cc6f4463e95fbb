"""Casts the author wrote stay in the graph, and take nobody else's readers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture.functional import shape_from
from auditor.records import Capture
from tests.support.capturing import Function
from tests.support.subjects import capture_of, nodes_by_op, only


def recorded(function: Any, *inputs: Tensor) -> Capture:
    return capture_of(Function(function), *inputs)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x, y: x.to(torch.float32),
        lambda x, y: x.to(dtype=torch.float32),
        lambda x, y: x.to("cpu", torch.float32),
        lambda x, y: x.to(y),
        lambda x, y: x.type_as(y),
        lambda x, y: x.type(torch.float32),
    ],
    ids=["dtype", "keyword", "device", "other", "type_as", "type"],
)
def test_every_way_to_write_a_cast(cast: Any) -> None:
    found = capture_of(Function(lambda x, y: cast(x, y).exp() + y), torch.ones(2), torch.ones(2))
    assert only(found, "exp").inputs == (only(found, "to").name,)


def test_a_cast_down_stays_and_computes_low() -> None:
    found = recorded(lambda x: x.half().exp().float(), torch.ones(2))
    assert [node.dtype for node in nodes_by_op(found, "to")] == ["float16", "float32"]
    assert only(found, "exp").dtype == "float16"


def residual(x: Tensor) -> Tensor:
    """An RMSNorm that raises its input, and a residual that does not."""
    y = x * 2
    raised = y.float()
    normed = raised * raised.pow(2).mean(-1, keepdim=True).rsqrt()
    return y + normed.to(y.dtype)


def test_the_residual_still_reads_the_value_and_not_its_cast() -> None:
    found = recorded(residual, torch.ones(2, 3))
    product, casts = nodes_by_op(found, "mul")[0].name, [node.name for node in nodes_by_op(found, "to")]
    add = only(found, "add")
    assert product in add.inputs
    assert casts[0] not in add.inputs
    assert only(found, "pow").inputs == (casts[0],)


@pytest.mark.parametrize("move", [lambda x: x.to(x.device), lambda x: x.to("cpu"), lambda x: x.cpu()])
def test_a_move_to_where_a_value_is_already_is_no_cast(move: Any) -> None:
    """Nobody wrote the dtype that torch hands on, so nothing has to be looked up in low runs."""
    found = recorded(lambda x: move(x).exp() + 1.0, torch.ones(2))
    assert not nodes_by_op(found, "to")
    assert not found.compared


def test_a_copy_in_place_is_no_move() -> None:
    def copied(x: Tensor) -> Tensor:
        y = (x + 1).to("cpu", copy=True)
        y += 1
        return y * x

    assert len(nodes_by_op(recorded(copied, torch.ones(2)), "to")) == 1


# Operations whose results take their shape from values: which argument's, if any.

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
