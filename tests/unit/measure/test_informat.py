"""One format, node after node: errors alone and in the low run, where they are born, and what attribution is handed."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.execution.execute import Executor
from auditor.measure.informat import InFormat
from auditor.measure.testrun import Trace
from auditor.numerics.entries import entries, is_number
from auditor.numerics.histogram import Profile
from auditor.records import NodeError
from tests.capturing import Function
from tests.subjects import capture_of

Found = tuple[dict[str, NodeError], dict[str, Trace]]


def measured(function: Any, x: Tensor, fmt: str, deciding: Collection[str] = ()) -> Found:
    """Every node of a function, right after the reference has run it."""
    captured = capture_of(Function(function), x)
    values: dict[str, Any] = {}
    profiles: dict[Any, Profile] = {}
    found = InFormat(captured, fmt, values, profiles, (), (), deciding, ())

    def observe(n: Any, value: Any) -> None:
        values[n.name] = value
        if isinstance(value, Tensor) and is_number(value):
            profiles[n] = Profile(entries(value))
        if n.op == "call_function":
            found.measure(n)

    Executor(captured.graph_module, observer=observe).run(x)
    return found.errors, found.traces


def test_alone_on_rounded_inputs_and_in_the_run_that_is_low_from_the_start() -> None:
    x = torch.tensor([1 + 3 * 2.0**-9])  # see test_lowrun.py
    errors, _ = measured(lambda x: (x * 3).neg(), x, "bf16")
    exact = 3 * x.item()
    assert errors["mul"].local_error == pytest.approx((3 + 2.0**-5 - exact) / exact)
    assert errors["neg"].local_error == pytest.approx((exact - 3 - 2.0**-6) / exact)
    assert errors["neg"].propagated_error == errors["mul"].propagated_error == errors["mul"].local_error


def test_an_overflow_is_born_once_and_kept_for_a_run() -> None:
    errors, traces = measured(lambda x: (x * x) - 1, torch.tensor([300.0, 2.0]), "fp16")
    assert (errors["mul"].overflow, errors["mul"].cause, errors["mul"].born) == (1, "overflow", True)
    assert traces["mul"].broken
    assert traces["mul"].low.tolist() == [math.inf, 4.0]
    assert (errors["sub"].overflow, errors["sub"].born) == (1, False)  # 90000 is beyond FP16 on its way in


def test_a_comparison_that_turns_is_told_by_its_share() -> None:
    x = torch.tensor([1 + 2.0**-12, 1.0])
    errors, traces = measured(lambda x: x * 1 > 1, x, "fp16")
    assert errors["gt"] == NodeError(disagreement=0.5, cause="discrete", born=True)
    assert traces["gt"].broken


def test_where_something_decides_by_a_result_is_told() -> None:
    x = torch.tensor([1.1])
    _, plain = measured(lambda x: x * 3, x, "fp16")
    _, near = measured(lambda x: x * 3, x, "fp16", deciding=("mul",))
    assert (plain["mul"].near, near["mul"].near) == (False, True)
    assert near["mul"].low is None
    assert not near["mul"].broken


def test_what_cannot_run_says_why_and_where_it_begins() -> None:
    errors, _ = measured(lambda x: torch.linalg.cholesky(x).exp(), 4 * torch.eye(2), "fp16")
    name = next(iter(errors))
    assert errors[name].cause == "unsupported"
    assert errors[name].born
    assert "CUDA" in str(errors[name].unsupported)
    assert errors["exp"].unsupported is None
