"""Which arguments an operation writes into, and that whoever saves them is told just before."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from auditor.state import storages, unchanged
from auditor.state.writes import SaveBeforeWrite, tells_nothing, written_by

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


def test_one_inside_of_another_is_told_first_and_costs_no_mode() -> None:
    x, outer, inner = torch.tensor([1.0]), Told(), Told()
    with SaveBeforeWrite(outer):
        depth = torch._C._len_torch_dispatch_stack()
        with SaveBeforeWrite(lambda tensors: [told(tensors) for told in (inner, lambda _: outer.entries.append([]))]):
            assert torch._C._len_torch_dispatch_stack() == depth
            x.mul_(3.0)
        x.mul_(3.0)
    x.mul_(3.0)
    assert inner.entries == [[[1.0]]]
    assert outer.entries == [[], [[1.0]], [[3.0]]]


def test_another_mode_between_keeps_them_apart() -> None:
    class Doubled(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            func(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    x, outer, inner = torch.tensor([1.0]), Told(), Told()
    with SaveBeforeWrite(outer), Doubled(), SaveBeforeWrite(inner):  # type: ignore[no-untyped-call]
        x.mul_(3.0)
    assert (inner.entries, outer.entries) == ([[[1.0]]], [[[1.0]], [[3.0]]])


class Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A class of tensors of somebody's own."""


@torch.no_grad()
def test_operations_that_nobody_has_to_be_told_of() -> None:
    x, running = torch.ones(2, 2), aten.native_batch_norm.default
    with SaveBeforeWrite(Told()):
        assert tells_nothing(aten.linear.default, [x, nn.Parameter(x)])
        assert not tells_nothing(aten.linear.default, [x, x.as_subclass(Own)])  # type: ignore[no-untyped-call]
        for writes in (
            aten.add_.Tensor,
            aten.add.out,
            running,
            torch.ops.higher_order.cond,
            torch.ops.prims.add.default,
        ):
            assert not tells_nothing(writes, [x])
        with torch.enable_grad():
            assert not tells_nothing(aten.linear.default, [x, x])
        with Looking():  # type: ignore[no-untyped-call]
            assert not tells_nothing(aten.linear.default, [x, x])
    assert not tells_nothing(aten.linear.default, [x, x])


def test_the_compiler_is_not_imported_for_it_and_leaves_it_alone() -> None:
    code = """
import sys, torch
from auditor.state.writes import SaveBeforeWrite
x, told = torch.ones(3), []
with SaveBeforeWrite(lambda tensors: told.append([y.sum().item() for y in tensors])):
    x.add_(1)
    print("torch._dynamo" in sys.modules)
    print(torch.compile(lambda x: x.mul_(2) + 1, backend="eager")(x).tolist(), told)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False", "[5.0, 5.0, 5.0] [[3.0], [6.0]]"], done.stderr
