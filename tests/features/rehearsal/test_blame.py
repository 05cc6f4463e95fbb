"""What is said of a run: the batch and the operation that a skipped step is due to, and whether a loss is behind."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.features.rehearsal.rehearse import problems_of
from auditor.features.rehearsal.result import FP32, NonFiniteStep, ParameterSeries, Recipe, RecipeRun
from auditor.records import ScopeChoice
from tests.features.rehearsal.cases import CASES, classes, mlp, plain, rehearsed
from tests.support.replaying import Model


def test_the_batch_that_breaks_is_named_with_its_operation_and_line() -> None:
    found = rehearsed("experts_with_a_rare_batch", 6, remedies=False)
    run = found.runs["fp16_autocast"]
    assert {each.batch for each in run.skipped} == {3, 4, 5}  # three of six batches have the row
    assert run.scale == 65536 / 2**3
    assert "backward pass of div" in run.skipped[0].where
    assert "cases.py" in run.skipped[0].where
    assert run.losses[0] == pytest.approx(found.runs["fp32"].losses[0], rel=1e-2)
    assert found.recommended == "bf16_autocast"


@pytest.mark.slow
def test_the_operation_to_blame_is_that_of_the_first_skipped_steps_where_later_ones_were_not_searched() -> None:
    found = rehearsed("cross_entropy_by_hand", 30, remedies=False)
    assert [each.module for each in found.runs["fp16_autocast"].skipped][:5] == ["(loss)"] * 4 + [None]
    (skipped,) = [p for p in found.problems if (p.recipe, p.kind) == ("fp16_autocast", "steps-skipped")]
    assert skipped.module == "(loss)"


@pytest.mark.slow
def test_the_order_of_batches_changes_no_statement() -> None:
    step, batches = CASES["experts_with_a_rare_batch"].make()
    found = auditor.rehearse(step, batches[::-1], 12, remedies=False)
    assert ("fp16_autocast", "steps-skipped") in {(each.recipe, each.kind) for each in found.problems}
    assert {each.batch for each in found.runs["fp16_autocast"].skipped} == {0, 1, 2}


@pytest.mark.parametrize(("later", "behind"), [(0.0, False), (0.02, True)])
def test_a_loss_that_fluctuates_around_that_of_fp32_is_not_behind(later: float, behind: bool) -> None:
    """Twelve steps of a sentence encoder in BF16, whose loss is rounded to 1/64: the last is 0.006 above FP32's, the last six 0.003 on average."""
    fp32 = [2.3846, 2.3888, 2.3463, 2.3771, 2.3878, 2.3683, 2.3640, 2.3945, 2.3919, 2.4294, 2.3932, 2.3220]
    low = [2.3906, 2.3906, 2.3438, 2.3750, 2.3750, 2.3594, 2.3594, 2.3906, 2.4062, 2.4375, 2.3906, 2.3281]
    runs = {"fp32": RecipeRun(FP32, fp32), "bf16": RecipeRun(Recipe("bf16", "BF16"), [x + later for x in low])}
    assert [each.kind for each in problems_of("bf16", runs)] == ["loss-behind"] * behind


def test_a_loss_scale_below_1_is_a_problem_only_where_steps_are_skipped() -> None:
    runs = {"fp32": RecipeRun(FP32, [1.0]), "fp16": RecipeRun(Recipe("fp16", "FP16", "fp16"), [1.0], scale=0.125)}
    assert list(problems_of("fp16", runs)) == []
    runs["fp16"].skipped.append(NonFiniteStep(0, 0, 0.25))
    assert [each.kind for each in problems_of("fp16", runs)] == ["steps-skipped"]


def test_a_share_is_the_mean_of_the_last_third_of_one_parameter_or_over_all_entries() -> None:
    rows = {
        "a": ParameterSeries(1, 0, updates_lost=[0.0, 1.0, 0.5]),
        "b": ParameterSeries(3, 0, updates_lost=[None, None, 0.25]),
        "c": ParameterSeries(9, 0, updates_lost=[1.0, 1.0, None]),
    }
    run = RecipeRun(FP32, errors=[1.0, 2.0, None, 3.0, 0.5, None], parameters=rows)
    assert [run.share("updates_lost", name) for name in rows] == [0.5, 0.25, None]
    assert run.share("updates_lost") == (0.5 + 3 * 0.25) / 4
    assert (run.share("error"), run.share("error", "a")) == (0.5, None)


def test_an_operation_that_fp32_makes_infinite_too_is_not_blamed_where_a_plan_adds_casts() -> None:
    def masked(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.norm(m.norm(x) * 2)
        hidden = x.masked_fill(x < 0, -torch.inf).softmax(-1)
        return m.last(hidden).abs().add(1) * 7e4

    model = Model(masked, norm=nn.LayerNorm(16), last=mlp(16, 4))
    plan = auditor.audit(model, torch.randn(8, 16), formats=["fp16"]).plans["autocast_fp16"]
    plan = dataclasses.replace(plan, scopes={"": ScopeChoice("fp16"), "norm": ScopeChoice("fp32")})
    step = plain(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    skipped = auditor.rehearse(step, classes(1), 1, plan=plan, remedies=False).runs["plan"].skipped
    assert "mul" in skipped[0].where, skipped


def test_the_innermost_module_that_is_being_called_is_blamed() -> None:
    inner = Model(lambda m, x: m.last(x) * 1e6, last=nn.Linear(16, 4))
    model = nn.Sequential(nn.Linear(16, 16), inner)
    step = plain(model, torch.optim.SGD(model.parameters(), lr=1e-9), lambda out, y: F.cross_entropy(out / 1e6, y))
    (skipped,) = auditor.rehearse(step, classes(1), 1, remedies=False).runs["fp16_autocast"].skipped
    assert (skipped.module, skipped.where.partition(" (")[0]) == ("1", "mul in 1")
