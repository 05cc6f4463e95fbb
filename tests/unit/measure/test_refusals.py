"""Whatever an operation raises in a format is a finding about that operation; only want of memory ends the audit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.measure.attribute import first_order
from auditor.measure.measure import measure
from auditor.measure.rerun import Yardstick, regions_of
from auditor.numerics.metrics import output_error
from auditor.plan.costs import costs_of
from auditor.plan.modules import Modules, Trial
from auditor.plan.problem import Problem
from auditor.plan.solve import evaluate
from auditor.records import Verdict
from tests.support.problems import NOTHING, owners_of
from tests.support.subjects import FORMATS, normal, subject_of

RAISED: list[type[Exception]] = [AssertionError, KeyError, RuntimeError]
_raised: list[BaseException] = []


@torch.library.custom_op("auditor_refusals::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """Twice its argument, which must be FP32."""
    if x.dtype is not torch.float32 and _raised:
        raise _raised[0]
    return x * 2


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


picky.register_autograd(lambda ctx, gradient: gradient * 2)


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(picky(self.before(x)))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    yield Picky()
    _raised.clear()


@pytest.mark.parametrize("kind", RAISED)
def test_a_node_that_raises_is_unsupported_with_the_reason(kind: type[Exception], model: nn.Module) -> None:
    _raised.append(kind("in a word"))
    subject = subject_of(model, normal(2, 4))
    captured = capture(subject)
    (node,) = (node for node in captured.nodes.values() if "picky" in node.op)
    found = measure(captured, subject.model, subject.batches[0], FORMATS)
    for fmt in FORMATS:
        error = found.errors[node.name][fmt]
        assert error.cause == "unsupported"
        assert "in a word" in str(error.unsupported)


def problem_of(captured: Any) -> Problem:
    every = [*captured.nodes, *(placeholder.name for placeholder in captured.placeholders)]
    verdicts = dict.fromkeys(captured.nodes, Verdict("safe", ""))
    return Problem(captured, costs_of(captured), dict.fromkeys(every, NOTHING), verdicts, "cast", "fp16", "A100")


@pytest.mark.parametrize("kind", RAISED)
def test_a_plan_that_raises_is_infinitely_far_off(kind: type[Exception], model: nn.Module) -> None:
    _raised.append(kind("in a word"))
    subject = subject_of(model, normal(2, 4))
    problem = problem_of(capture(subject))
    trial = Trial(problem.capture, subject.model, subject.batches, [[model(normal(2, 4))]], output_error)
    assert (
        Modules(problem, trial, 0.01).error(evaluate(problem, dict.fromkeys(owners_of(problem.capture), "fp16")))
        == math.inf
    )


@pytest.mark.parametrize("kind", RAISED)
def test_a_region_that_raises_says_why(kind: type[Exception], model: nn.Module) -> None:
    subject = subject_of(model, normal(2, 4))
    captured = capture(subject)
    measured = measure(captured, subject.model, subject.batches[0], FORMATS)
    found = first_order(measured).contributions
    _raised.append(kind("in a word"))
    regions = [*regions_of(measured, found, Yardstick(1e-9))]
    assert regions
    assert all("in a word" in str(region.failure) for region in regions)


def test_want_of_memory_is_no_finding(model: nn.Module) -> None:
    subject = subject_of(model, normal(2, 4))
    captured = capture(subject)
    measured = measure(captured, subject.model, subject.batches[0], FORMATS)
    found = first_order(measured).contributions
    problem = problem_of(captured)
    trial = Trial(captured, subject.model, subject.batches, [[model(normal(2, 4))]], output_error)
    low = evaluate(problem, dict.fromkeys(owners_of(captured), "fp16"))
    _raised.append(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        measure(captured, subject.model, subject.batches[0], FORMATS)
    with pytest.raises(torch.OutOfMemoryError):
        Modules(problem, trial, 0.01).error(low)
    with pytest.raises(torch.OutOfMemoryError):
        [*regions_of(measured, found, Yardstick(1e-9))]
