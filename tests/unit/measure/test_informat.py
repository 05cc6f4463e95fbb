"""One format, node after node: errors alone and in the low run, where they are born, and what attribution is handed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from auditor.execution.execute import Executor
from auditor.measure import alone
from auditor.measure.alone import InFormat, Trace
from auditor.numerics.entries import entries, is_number
from auditor.numerics.histogram import Profile
from auditor.records import Capture, NodeError
from tests.support.capturing import Function
from tests.support.subjects import capture_of

Found = tuple[dict[str, NodeError], dict[str, Trace]]


def measured(function: Any, x: Tensor, fmt: str) -> Found:
    """Every node of a function, right after the reference has run it."""
    captured = capture_of(Function(function), x)
    values: dict[str, Any] = {}
    profiles: dict[Any, Profile] = {}
    told: dict[str, tuple[NodeError, Trace]] = {}
    found = InFormat(captured, fmt, values, profiles, ())

    def observe(n: Any, value: Any) -> None:
        values[n.name] = value
        if isinstance(value, Tensor) and is_number(value):
            profiles[n] = Profile(entries(value))
        if n.op == "call_function":
            told[n.name] = found.measure(n)

    Executor(captured.graph_module, observer=observe).run(x)
    return {name: error for name, (error, _) in told.items()}, {name: trace for name, (_, trace) in told.items()}


def test_alone_on_rounded_inputs_and_in_the_run_that_is_low_from_the_start() -> None:
    x = torch.tensor([1 + 3 * 2.0**-9])  # see X
    errors, _ = measured(lambda x: (x * 3).neg(), x, "bf16")
    exact = 3 * x.item()
    assert errors["mul"].local_error == pytest.approx((3 + 2.0**-5 - exact) / exact)
    assert errors["neg"].local_error == pytest.approx((exact - 3 - 2.0**-6) / exact)
    assert errors["neg"].propagated_error == errors["mul"].propagated_error == errors["mul"].local_error


def test_an_overflow_is_born_once() -> None:
    errors, traces = measured(lambda x: (x * x) - 1, torch.tensor([300.0, 2.0]), "fp16")
    assert (errors["mul"].overflow, errors["mul"].cause, errors["mul"].born) == (1, "overflow", True)
    assert traces["mul"].broken
    assert (errors["sub"].overflow, errors["sub"].born) == (1, False)  # 90000 is beyond FP16 on its way in


def test_a_comparison_that_turns_is_told_by_its_share() -> None:
    x = torch.tensor([1 + 2.0**-12, 1.0])
    errors, traces = measured(lambda x: x * 1 > 1, x, "fp16")
    assert errors["gt"] == NodeError(disagreement=0.5, cause="discrete", born=True)
    assert traces["gt"].broken


def test_where_something_decides_by_a_result_is_told() -> None:
    x = torch.tensor([1.1])
    _, plain = measured(lambda x: (x * 3).exp(), x, "fp16")
    _, near = measured(lambda x: (x * 3) > 1, x, "fp16")
    assert (plain["mul"].near, near["mul"].near) == (False, True)
    assert not near["mul"].broken


def test_what_cannot_run_says_why_and_where_it_begins() -> None:
    errors, _ = measured(lambda x: torch.linalg.cholesky(x).exp(), 4 * torch.eye(2), "fp16")
    name = next(iter(errors))
    assert errors[name].cause == "unsupported"
    assert errors[name].born
    assert "CUDA" in str(errors[name].unsupported)
    assert errors["exp"].unsupported is None


X = torch.tensor([1 + 3 * 2.0**-9])
"""In BF16 1 + 2^-7. Three times that is 3 + 1.5 * 2^-6, rounded to even 3 + 2^-5; of X itself, it is nearest 3 + 2^-6."""


def low_run(captured: Capture, fmt: str, x: Tensor) -> tuple[InFormat, dict[str, fx.Node]]:
    """What runs a graph low from the start, all of its reference being known, and the nodes."""
    values: dict[str, Any] = {}
    Executor(captured.graph_module, observer=lambda n, value: values.update({n.name: value})).run(x)
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    return InFormat(captured, fmt, values, {}, ()), nodes


def test_reference_values_are_rounded_and_low_values_go_on() -> None:
    low, nodes = low_run(capture_of(Function(lambda x: (x * 3).neg()), X), "bf16", X)
    x = low.value_of(nodes["mul"].all_input_nodes[0])
    assert (x.item(), x.dtype) == (1 + 2.0**-7, torch.bfloat16)
    low.advance(nodes["mul"])
    low.advance(nodes["neg"])
    assert low.alone.rounded(nodes["mul"]).item() == 3 + 2.0**-6  # what enters the other
    assert low.env[nodes["mul"]].item() == -low.env[nodes["neg"]].item() == 3 + 2.0**-5
    assert low.pure


def test_where_an_operation_cannot_run_the_low_run_goes_on_from_the_reference() -> None:
    matrix = torch.tensor([[4.0, 0.0], [0.0, 9.0]])
    captured = capture_of(Function(torch.linalg.cholesky), matrix)
    low, nodes = low_run(captured, "fp16", matrix)
    name = next(iter(captured.nodes))
    low.advance(nodes[name])
    assert torch.equal(low.env[nodes[name]], torch.tensor([[2.0, 0.0], [0.0, 3.0]]).half())
    assert not low.pure


def test_memory_that_runs_out_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("nothing left")

    low, nodes = low_run(capture_of(Function(lambda x: x * 3), X), "bf16", X)
    monkeypatch.setattr(alone, "run_op", full)
    with pytest.raises(torch.OutOfMemoryError):
        low.advance(nodes["mul"])
