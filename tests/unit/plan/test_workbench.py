"""What plans are made from: reference answers that are run once, and problems by strategy and format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from auditor.numerics.metrics import output_error
from auditor.plan.costs import Cost
from auditor.plan.workbench import Workbench
from auditor.records import Contribution, Noise, Verdict
from tests.subjects import capture_of, subject_of


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


ONE, TWO = torch.zeros(2), torch.ones(2)


def bench(**changes: Any) -> Workbench:
    model = AddOne()
    subject = subject_of(model, ONE)
    capture = capture_of(model, ONE)
    (name,) = capture.nodes
    found = Workbench(
        subject=subject,
        capture=capture,
        costs={name: Cost(1, 1, False)},
        contributions={"fp16": {name: Contribution(0.1, 0.1, 0.1)}, "bf16": {name: Contribution(0.2, 0.2, 0.2)}},
        verdicts={"fp16": {name: Verdict("unsafe", "")}, "bf16": {name: Verdict("safe", "")}},
        findings=(),
        distance=output_error,
        budget=0.01,
        seed=0,
        gpu="A100",
        device="cpu",
    )
    return replace(found, **changes)


def test_answers_with_gradients_or_none() -> None:
    (answer,) = bench().graded or []
    assert answer.tolist() == [1.0, 1.0]

    class Refusing(AddOne):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("for inference")
            return super().forward(x)

    found = bench()
    refusing = replace(found, subject=subject_of(Refusing(), ONE))
    assert refusing.graded is None
    assert refusing.ungraded is not None
    assert refusing.ungraded.startswith("RuntimeError: ")
    assert found.ungraded is None


def test_a_plan_may_err_by_the_budget_or_by_what_is_no_error_here() -> None:
    assert bench().max_error == 0.01
    assert bench(floor=Noise(error=0.001, floor=0.003)).max_error == 0.01
    loud = bench(floor=Noise(error=0.01, floor=0.03))
    assert (loud.max_error, loud.budget) == (0.03, 0.01)


def test_a_problem_is_of_its_own_format() -> None:
    found = bench()
    (name,) = found.capture.nodes
    problem = found.problem("cast", "bf16")
    assert (problem.name, problem.device) == ("cast_bf16", "A100")
    assert (problem.contributions[name].own, problem.verdicts[name].verdict) == (0.2, "safe")
