"""A format beside the reference: what is rounded, and what a run that is low from the start makes of it, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from auditor.execution.execute import Executor
from auditor.measure import lowrun
from auditor.measure.lowrun import LowRun, same_shapes
from auditor.records import Capture
from tests.capturing import Function
from tests.subjects import capture_of

X = torch.tensor([1 + 3 * 2.0**-9])
"""In BF16 1 + 2^-7. Three times that is 3 + 1.5 * 2^-6, rounded to even 3 + 2^-5; of X itself, it is nearest 3 + 2^-6."""


def values_of(capture: Capture, x: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    Executor(capture.graph_module, observer=lambda n, value: found.update({n.name: value})).run(x)
    return found


def nodes_of(capture: Capture) -> dict[str, fx.Node]:
    return {node.name: node for node in capture.graph_module.graph.nodes}


def test_reference_values_are_rounded_and_low_values_go_on() -> None:
    captured = capture_of(Function(lambda x: (x * 3).neg()), X)
    nodes, low = nodes_of(captured), LowRun(captured, "bf16", values_of(captured, X))
    (x, three), _ = low.rounded_inputs(nodes["mul"])
    assert (x.item(), x.dtype, three) == (1 + 2.0**-7, torch.bfloat16, 3)
    low.advance(nodes["mul"])
    low.advance(nodes["neg"])
    ((rounded,), _) = low.rounded_inputs(nodes["neg"])
    assert rounded.item() == 3 + 2.0**-6  # what enters it
    assert low.env[nodes["mul"]].item() == -low.env[nodes["neg"]].item() == 3 + 2.0**-5


def test_where_an_operation_cannot_run_the_low_run_goes_on_from_the_reference() -> None:
    matrix = torch.tensor([[4.0, 0.0], [0.0, 9.0]])
    captured = capture_of(Function(torch.linalg.cholesky), matrix)
    nodes, low = nodes_of(captured), LowRun(captured, "fp16", values_of(captured, matrix))
    name = next(iter(captured.nodes))
    low.advance(nodes[name])
    assert torch.equal(low.env[nodes[name]], torch.tensor([[2.0, 0.0], [0.0, 3.0]]).half())


def test_what_is_forgotten_is_rounded_anew() -> None:
    captured = capture_of(Function(lambda x: x * 3), X)
    nodes, values = nodes_of(captured), values_of(captured, X)
    low = LowRun(captured, "bf16", values)
    (first, _), _ = low.rounded_inputs(nodes["mul"])
    (again, _), _ = low.rounded_inputs(nodes["mul"])
    assert again is first
    low.forget(list(nodes.values()))
    (anew, _), _ = low.rounded_inputs(nodes["mul"])
    assert anew is not first
    assert torch.equal(anew, first)


def test_shapes_of_results() -> None:
    assert same_shapes((torch.ones(2), [torch.ones(3)]), [torch.zeros(2), torch.zeros(3)])
    assert not same_shapes(torch.ones(2), torch.ones(3))
    assert not same_shapes(torch.ones(2), (torch.ones(2), torch.ones(2)))


def test_memory_that_runs_out_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("nothing left")

    captured = capture_of(Function(lambda x: x * 3), X)
    low = LowRun(captured, "bf16", values_of(captured, X))
    monkeypatch.setattr(lowrun, "run_op", full)
    with pytest.raises(torch.OutOfMemoryError):
        low.advance(nodes_of(captured)["mul"])
