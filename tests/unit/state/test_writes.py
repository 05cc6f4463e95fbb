"""Which arguments an operation writes into, and that whoever saves them is told just before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from auditor.state import storages, unchanged
from auditor.state.writes import SaveBeforeWrite, written_by

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operation", "names"),
    [
        (aten.add.Tensor, []),
        (aten.add_.Tensor, ["self"]),
        (aten.add.out, ["out"]),
        (aten._foreach_add_.Scalar, ["self"]),
        (aten.native_batch_norm.default, ["running_mean", "running_var"]),
        (aten.batch_norm.default, ["running_mean", "running_var"]),
        (aten.cudnn_batch_norm.default, ["running_mean", "running_var"]),
        (aten.batch_norm_update_stats.default, ["running_mean", "running_var"]),
        (aten.embedding_renorm_.default, ["self"]),
        (aten.set_.source_Tensor, ["self"]),
        (aten.resize_.default, ["self"]),
        (aten._fused_adam_.default, ["self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]),
    ],
)
def test_what_an_operation_writes(operation: Any, names: list[str]) -> None:
    assert [name for _, name in written_by(operation)] == names


def test_an_operation_that_says_nothing_may_write_anything() -> None:
    assert written_by(torch.ops.higher_order.cond) is None


@pytest.fixture
def none_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "AT_ONCE", dict.fromkeys(storages.Role, 0))


def test_an_operation_that_declares_no_write(none_at_once: None) -> None:
    """Its name says what its schema doesn't."""
    library = torch.library.Library("state_tests", "FRAGMENT")
    library.define("poke_(Tensor x) -> ()")
    library.impl("poke_", lambda x: x.untyped_storage().fill_(0) and None, "CPU")
    model = nn.Module()
    model.state = torch.ones(2)
    with unchanged(model):
        torch.ops.state_tests.poke_(model.state)
        assert model.state.tolist() == [0, 0]
    assert model.state.tolist() == [1, 1]


class Told:
    """What is about to be written, as it is then."""

    def __init__(self) -> None:
        self.entries: list[list[list[float]]] = []

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        self.entries.append([x.tolist() for x in tensors])


def test_the_old_entries_are_there_when_it_is_told() -> None:
    x, y, told = torch.tensor([1.0]), torch.tensor([2.0]), Told()
    with SaveBeforeWrite(told):
        z = x + y  # writes nothing that was there
        x.mul_(3.0)
        torch.add(x, y, out=y)
        torch._foreach_add_([x, z], 1.0)
    assert told.entries == [[[1.0]], [[2.0]], [[3.0], [3.0]]]
    assert (x.item(), y.item(), z.item()) == (4.0, 5.0, 4.0)


def test_where_nothing_is_declared_all_tensors_are_told_of() -> None:
    told = Told()
    with SaveBeforeWrite(told):
        torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.tensor([5.0]),))
    assert [5.0] in told.entries[0]
