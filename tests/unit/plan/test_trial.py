"""Runs of the graph under a choice, begun from one beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from auditor.execution.policy import Policy
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.metrics import output_error
from auditor.plan import modules as module
from auditor.plan.modules import Trial
from auditor.records import Capture
from tests.support.subjects import capture_of, normal, seeded


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))


@pytest.fixture(scope="module")
def capture(model: nn.Module) -> Capture:
    return capture_of(model, normal(4, 16))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each run computed."""
    found: list[int] = []

    class Counted(module.Executor):
        def steps(self, *inputs: Any) -> Iterator[tuple[fx.Node, Any]]:
            found.append(0)
            return super().steps(*inputs)

        def run_node(self, n: fx.Node) -> Any:
            found[-1] += n.op == "call_function"
            return super().run_node(n)

    monkeypatch.setattr(module, "Executor", Counted)
    return found


def trial_of(model: nn.Module, capture: Capture, *inputs: torch.Tensor) -> Trial:
    batches = [((x,), {}) for x in inputs]
    with torch.no_grad():
        references = [tensor_outputs(model(x)) for x in inputs]
    return Trial(capture, model, batches, references, output_error)


def keeping(capture: Capture, kept: Sequence[str]) -> Policy:
    return Policy(capture, "cast", lambda path: "fp32" if path in kept else "bf16", "bf16")


def test_runs_beside_one_begin_from_it_and_come_to_the_same(model: nn.Module, capture: Capture, ran: list[int]) -> None:
    x = normal(4, 16)
    policies = [keeping(capture, kept) for kept in ((), ("3",), ("5",), ("1", "3"))]
    expected = [trial_of(model, capture, x).error(how) for how in policies]
    ran.clear()
    beside = trial_of(model, capture, x).near()
    assert [beside.error(how) for how in policies] == expected
    assert ran == [6, 3, 1, 5]


def test_each_batch_is_run_on_its_own_values(model: nn.Module, capture: Capture) -> None:
    inputs, policies = (normal(4, 16), 3 * normal(4, 16)), [keeping(capture, kept) for kept in ((), ("3",))]
    beside = trial_of(model, capture, *inputs).near()
    for how in policies:
        assert beside.error(how) == max(trial_of(model, capture, x).error(how) for x in inputs)
        assert beside.error(how) == trial_of(model, capture, *reversed(inputs)).near().error(how)


def test_what_the_first_run_raises_leaves_the_next_to_begin(model: nn.Module, capture: Capture, ran: list[int]) -> None:
    x, beside = normal(4, 16), trial_of(model, capture, normal(4, 16)).near()
    refusing = Policy(capture, "cast", lambda path: "bf16" if path == "3" else "fp32", "bf16")
    refusing.crossing = lambda source, reader: ()  # type: ignore[method-assign]  # two dtypes meet at a product
    with pytest.raises(UnsupportedInFormat):
        beside.error(refusing)
    how, late = keeping(capture, ("1",)), keeping(capture, ("1", "5"))
    assert beside.error(how) == trial_of(model, capture, x).error(how)
    assert beside.error(late) == trial_of(model, capture, x).error(late)
