"""The operation and the line to blame for a step that fails, or whose loss is wrong."""

import inspect
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import auditor
from auditor.errors import AuditorError
from auditor.features.rehearsal.forked import call_forked
from auditor.features.rehearsal.rehearse import FIRST_SCALE, recipe_as_written
from auditor.features.rehearsal.result import AS_WRITTEN, FP32, NonFiniteStep, Recipe, RecipeRun
from auditor.features.rehearsal.session import Session
from tests.features.rehearsal import failures
from tests.features.rehearsal.cases import classes, mlp
from tests.features.rehearsal.failures import IN_FP32, NAN_LOSS, OF_STATE, TOO_GOOD, Failure
from tests.support.refusing import refused
from tests.support.thinned import thinned

RECIPES = {
    "fp32": FP32,
    "fp16_autocast": Recipe("fp16_autocast", "FP16", "fp16", scale=FIRST_SCALE),
    "bf16_autocast": Recipe("bf16_autocast", "BF16", "bf16"),
    "bf16": Recipe("bf16", "BF16", "bf16", stored=True),
}
STEPS = 3


def run_failure(one: Failure, recipe: str) -> RecipeRun:
    step, batches = one.make()
    session = Session(step, lambda: cycle(enumerate(batches)), 0)
    own = next(recipe_as_written(session)) if recipe == AS_WRITTEN else RECIPES[recipe]
    run: RecipeRun = call_forked(partial(session.run, own, STEPS))
    session.explain(run)
    return run


def marked_line(one: Failure) -> str:
    """The only line of the case, or of its module, with the mark "# <-"."""
    lines, first = inspect.getsourcelines(one.marked or one.make)
    (line,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("# <-")]
    return f"{Path(failures.__file__).name}:{line}"


def assert_blamed(bad: NonFiniteStep, one: Failure) -> None:
    assert bad.where.startswith(one.blamed), bad
    assert f"({marked_line(one)})" in bad.where, bad


@pytest.mark.parametrize("name", thinned(NAN_LOSS))
def test_a_nan_loss_with_finite_gradients_names_its_operation(name: str) -> None:
    one = NAN_LOSS[name]
    run = run_failure(one, one.recipe)
    assert run.bad_losses
    for bad in run.bad_losses:
        assert_blamed(bad, one)


@pytest.mark.parametrize("name", thinned(IN_FP32))
def test_a_step_that_fails_in_fp32_too_names_its_operation(name: str) -> None:
    one = IN_FP32[name]
    run = run_failure(one, "fp32")
    assert_blamed((*run.skipped, *run.bad_losses)[0], one)


def test_a_step_that_fails_in_low_precision_and_in_fp32_says_so() -> None:
    one = IN_FP32["the_mean_of_nothing"]
    (bad, *_) = run_failure(one, "bf16_autocast").bad_losses
    assert bad.where == f"div ({marked_line(one)}), in FP32 at the same weights too"


@pytest.mark.parametrize("name", thinned(OF_STATE))
def test_state_that_the_failing_step_changes_is_that_before_the_step(name: str) -> None:
    one = OF_STATE[name]
    run = run_failure(one, one.recipe)
    assert_blamed(run.skipped[-1], one)


def test_weights_that_an_update_makes_infinite_are_due_to_the_update() -> None:
    model = mlp(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean() * 1e3
        loss.backward()
        optimizer.step()
        return loss.detach()

    with refused(
        AuditorError, "bad-step", match=r"step 0 \(batch 0\), first at the update of SGD, from finite gradients"
    ):
        auditor.rehearse(step, classes(1), 1)


def test_a_loss_that_is_not_finite_in_fp32_is_a_problem_of_fp32() -> None:
    found = auditor.rehearse(*IN_FP32["the_mean_of_nothing"].make(), 1, remedies=False)
    (problem, *_) = found.problems
    assert (problem.recipe, problem.kind) == ("fp32", "loss-not-finite")
    assert "first appears at div (failures.py:" in problem.text


@pytest.mark.parametrize("name", thinned(TOO_GOOD))
def test_a_loss_that_differs_from_that_of_fp32_names_its_operation(name: str) -> None:
    one = TOO_GOOD[name]
    origin = run_failure(one, one.recipe).loss_origin
    assert origin is not None
    assert origin.where == f"{one.blamed} ({marked_line(one)})"
    assert origin.before < origin.after / 4
