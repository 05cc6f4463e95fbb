"""Which error moves the gradients, against running each operation alone in low precision."""

from __future__ import annotations

import copy

import pytest
import torch

from auditor.execution.step import Step, bind_step, run_step
from auditor.records import Contribution
from auditor.training import gradients
from auditor.training.backward import backward_errors
from auditor.training.gradients import attribute_gradients, jumps, rerun
from auditor.training.objective import in_training, training_subject
from auditor.training.step import capture_step, step_batches
from tests.unit.training.conftest import loss_fn, made


@pytest.fixture(scope="module")
def steps() -> tuple[Step, dict[str, dict[str, Contribution]]]:
    model, tokens, targets = made()
    subject = training_subject(copy.deepcopy(model), (tokens, targets), {}, loss_fn)
    with in_training(subject.model):
        captured = capture_step(subject, ("bf16",))
        batch = step_batches(subject)[0]
        step = run_step(bind_step(captured, subject, batch, 0))
        handed = {
            n: {f: one.handed for f, one in found.items()} for n, found in backward_errors(step, ("bf16",)).items()
        }
        twice = run_step(bind_step(captured, subject, batch, 0), create_graph=True)
        return step, attribute_gradients(twice, handed, seed=0, passes=32)


def test_gradients_of_both_kinds_of_run_are_the_same(steps: tuple[Step, dict[str, dict[str, Contribution]]]) -> None:
    step, _ = steps
    again = run_step(bind_again(step), create_graph=True)
    for name, gradient in step.by_parameter.items():
        assert torch.allclose(gradient, again.by_parameter[name].detach(), atol=1e-6)


def bind_again(step: Step) -> Step:
    return Step(step.capture, step.subject, step.batch, step.flat, step.parameters, step.seed)


def test_first_order_is_near_brute_force(steps: tuple[Step, dict[str, dict[str, Contribution]]]) -> None:
    step, first = steps
    brute = rerun(step, first)
    checked = 0
    for name, found in first.items():
        true = brute[name]["bf16"]
        if true.isolated > 1e-6:
            assert true.decided_by == "re-run"
            assert found["bf16"].isolated == pytest.approx(true.isolated, rel=0.6)
            checked += 1
    assert checked >= 8
    worst = max(first, key=lambda name: first[name]["bf16"].isolated)
    top = sorted(brute, key=lambda name: -brute[name]["bf16"].isolated)[:3]
    assert worst in top


def test_gelu_has_no_kink_and_relu_has(steps: tuple[Step, dict[str, dict[str, Contribution]]]) -> None:
    step, _ = steps
    assert not jumps(step.capture)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    subject = training_subject(model, (torch.ones(2, 3), torch.ones(2, 3)), {}, torch.nn.MSELoss())
    with in_training(model):
        assert jumps(capture_step(subject, ("bf16",)))


def test_operations_are_run_again_by_what_they_move_in_any_format(
    steps: tuple[Step, dict[str, dict[str, Contribution]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, known = steps
    guesses = dict(zip(known, [{"fp16": 0.1, "bf16": 0.9}, {"fp16": 0.5, "bf16": 0.5}], strict=False))
    first = {name: {fmt: Contribution(moved, 0.0, 0.0) for fmt, moved in one.items()} for name, one in guesses.items()}
    heavier, lighter = first
    monkeypatch.setattr(gradients, "RERUNS", 1)
    found = rerun(step, first)
    assert {one.decided_by for one in found[heavier].values()} == {"re-run"}
    assert found[lighter] == first[lighter]
    monkeypatch.setattr(gradients, "ELEMENTS", 1)
    assert rerun(step, first) == first  # the results of this step hold more than one entry
