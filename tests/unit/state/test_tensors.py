"""One tensor put back: its place in memory, its flag, its being a leaf, its hooks, its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from auditor.state.storages import Role, Storages
from auditor.state.tensors import TensorState


def weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0).reshape(2, 3))


def put_back(state: TensorState) -> None:
    state.restore()
    state.restore_gradient()


def data_replaced(x: nn.Parameter) -> None:
    x.data = torch.zeros(5)


def transposed(x: nn.Parameter) -> None:
    x.data = x.data.t()


def resized(x: nn.Parameter) -> None:
    x.data.resize_(12)


@pytest.mark.parametrize("change", [data_replaced, transposed, resized])
def test_the_place_comes_back(change: Callable[[nn.Parameter], None]) -> None:
    x = weight()
    state, storage = TensorState(x), x.untyped_storage()._cdata
    change(x)
    put_back(state)
    assert (x.shape, x.stride(), x.untyped_storage()._cdata) == ((2, 3), (3, 1), storage)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_entries_are_the_storages_affair() -> None:
    x = weight()
    state = TensorState(x)
    x.data.mul_(2)
    put_back(state)
    assert x[1, 2].item() == 10  # 5 * 2: nobody watched the memory
    watched, storages = TensorState(x), Storages()
    watched.watch(storages, Role.PARAMETER)
    storages.copy_small()
    x.data.zero_()
    put_back(watched)
    assert list(storages.restore()) == []
    assert x[1, 2].item() == 10


def test_a_sparse_tensor_is_given_the_parts_that_it_was_made_of() -> None:
    x = torch.eye(2).to_sparse()
    state = TensorState(x)
    x.mul_(7)  # writes new values beside the old
    put_back(state)
    assert x.to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_entries_that_lie_nowhere_torch_can_say_are_copied_at_once() -> None:
    x = torch.ones(2).to_mkldnn()
    state = TensorState(x)
    state.watch(Storages(), Role.PLAIN)
    x.mul_(7)
    put_back(state)
    assert x.to_dense().tolist() == [1, 1]


def test_what_asks_for_gradients() -> None:
    x, fixed = weight(), torch.ones(2)
    states = [TensorState(x), TensorState(fixed)]
    x.requires_grad_(False)
    fixed.requires_grad_(True)
    for state in states:
        put_back(state)
    assert (x.requires_grad, fixed.requires_grad) == (True, False)


def test_a_leaf_is_a_leaf_again() -> None:
    buffer, base = torch.ones(2), torch.zeros(4)
    view = base[1:3]
    states = [TensorState(buffer), TensorState(view)]
    factor = torch.ones(2, requires_grad=True)
    buffer.mul_(factor)
    view.add_(factor)
    assert not buffer.is_leaf
    assert not view.is_leaf
    for state in states:
        put_back(state)
    assert buffer.is_leaf
    assert view.is_leaf
    view.fill_(3.0)
    assert base.tolist() == [0, 3, 3, 0]  # still a view of its base


def test_a_view_that_is_referred_to_weakly_is_a_leaf_again() -> None:
    base = torch.zeros(4)
    view = base[1:3]
    reference, state = weakref.ref(view), TensorState(view)
    view.add_(torch.ones(2, requires_grad=True))
    put_back(state)
    assert view.is_leaf
    assert not view.requires_grad
    assert reference() is view


def test_gradients_by_identity() -> None:
    x, without = weight(), weight()
    x.grad = kept = torch.ones(2, 3)
    states = [TensorState(x), TensorState(without)]
    x.grad = torch.zeros(2, 3)
    without.grad = torch.zeros(2, 3)
    for state in states:
        put_back(state)
    assert x.grad is kept
    assert without.grad is None


def test_hooks_added_go_and_hooks_removed_come_back() -> None:
    x = weight()
    calls: list[str] = []
    handle = x.register_hook(lambda gradient: calls.append("old"))
    state = TensorState(x)
    handle.remove()
    x.register_hook(lambda gradient: calls.append("new"))
    put_back(state)
    x.sum().backward()
    assert calls == ["old"]
