"""Results that were given up come back bit for bit, are computed from what is left, and autograd finds its way through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

from auditor.execution import held
from auditor.execution.held import DEEP, Held, Slots, goes, hollow


class _Counting:
    """Adds 1 to the value before; counts how often."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def __call__(self, key: int, values: Mapping[int, Any]) -> torch.Tensor:
        self.ran.append(key)
        before: torch.Tensor = values[key - 1]
        return before + 1


def _chain(length: int) -> tuple[Held[int], _Counting]:
    again = _Counting()
    values = Held[int](again)
    for key in range(length):
        values[key] = torch.full((16,), float(key))
        if key:
            values.may_go(key, [key - 1])
    return values, again


def test_what_was_given_up_is_computed_again_when_it_is_read() -> None:
    values, again = _chain(4)
    for key in range(4):
        values.give_up(key)
    assert again.ran == []
    assert [float(values[key][0]) for key in (3, 0)] == [3.0, 0.0]  # 0 is not computed from anything, and was kept
    assert again.ran == [3, 2, 1]


def test_no_value_takes_more_operations_than_that() -> None:
    values, again = _chain(3 * DEEP)
    for key in range(3 * DEEP):
        values.give_up(key)
    for key in reversed(range(3 * DEEP)):
        again.ran.clear()
        assert float(values[key][0]) == key
        assert len(again.ran) <= DEEP
    kept = [key for key in range(3 * DEEP) if key not in values._gone]
    assert kept == [0, DEEP + 1, 2 * (DEEP + 1)]


def test_a_backward_sweep_computes_a_chain_once_where_there_is_room_for_it() -> None:
    values, again = _chain(DEEP + 1)
    values[100] = torch.zeros(16 * 1000)
    values.may_go(100, [0])
    for key in (*range(DEEP + 1), 100):
        values.give_up(key)
    for key in reversed(range(DEEP + 1)):
        _ = values[key]
    assert sorted(again.ran) == list(range(1, DEEP + 1))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: x * 2.0, True),
        (lambda x: torch.nn.functional.gelu(x), True),
        (lambda x: torch.layer_norm(x, (8,)), True),
        (lambda x: x.softmax(-1), True),
        (lambda x: x.transpose(0, 1).contiguous(), True),
        (lambda x: x.transpose(0, 1), False),  # in the memory of the input, which is kept
        (lambda x: x @ x.t(), False),
        (lambda x: x.cumsum(0), False),
        (lambda x: torch.nn.functional.dropout(x, 0.5, True), False),
        (lambda x: x > 0, False),
    ],
)
def test_which_results_may_go(compute: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "SMALL", 1)
    x = torch.randn(8, 8)
    graph = torch.fx.experimental.proxy_tensor.make_fx(compute, pre_dispatch=True)(x).graph
    last = [n for n in graph.nodes if n.op == "call_function"][-1]
    sources: dict[str, Any] = {}

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            sources[n.name] = super().run_node(n)
            return sources[n.name]

    Run(fx.GraphModule(nn.Module(), graph)).run(x)
    values = Held[str](lambda key, known: known[key])
    read = {s.name: sources[s.name] for s in last.all_input_nodes}
    assert goes(values, last.name, last, sources[last.name], read) is expected


@pytest.mark.parametrize("first", [0, 1])
def test_autograd_goes_back_through_results_that_are_computed_again(first: int) -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def again(key: str, known: Mapping[str, Any]) -> torch.Tensor:
        ran.append(key)
        return known["x"].detach().tanh()

    ran: list[str] = []
    values = Held[str](again)
    slots = Slots(values)
    with slots.hooks():
        values["x"] = x.detach()
        slots.settle()
        y = x.tanh()
        values["y"] = y.detach()
        assert values.may_go("y", ["x"])
        slots.alive("y", values["y"])
        slots.settle()
        z = (y[first:].t() @ weight[first:4]).sum()  # reads a view of it
        slots.settle()
    expected = torch.autograd.grad((x.tanh()[first:].t() @ weight[first:4]).sum(), (x, weight))
    slots.give_up("y")
    y.data = torch.empty(()).expand(y.shape)
    found = torch.autograd.grad(z, (x, weight))
    assert ran == ["y"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_hollow_tensor_has_its_gradient_and_no_memory() -> None:
    x = torch.ones(8, requires_grad=True)
    seen: list[torch.Tensor] = []
    y = x * 3
    y.register_hook(seen.append)
    total = (y * 2).sum()
    hollow(y)
    assert y.shape == (8,) and y.untyped_storage().nbytes() == 4
    total.backward()
    assert seen[0].tolist() == [2.0] * 8 and x.grad is not None and x.grad.tolist() == [6.0] * 8
