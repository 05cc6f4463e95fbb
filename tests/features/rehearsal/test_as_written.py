"""The step as written: its own regions, scalers and calls, and a finding with its line for each call that does not fit."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.errors import AuditorError
from auditor.features.rehearsal.forked import call_forked
from auditor.features.rehearsal.page import overview, render
from auditor.features.rehearsal.rehearse import problems_of, recipe_as_written, recommend
from auditor.features.rehearsal.result import FP32, NonFiniteStep, Recipe, RecipeRun
from auditor.features.rehearsal.session import Session
from auditor.report.blocks import Prose
from tests.features.rehearsal import steps_by_calls, steps_by_factor, steps_by_hand, steps_in_the_wild
from tests.features.rehearsal.cases import classes, mlp
from tests.features.rehearsal.stepping import RIGHT, STEPS, WRONG, Loop, Step, marked_line, run_as_written
from tests.support.refusing import refused
from tests.support.thinned import thinned

STEP_FILES = steps_by_calls, steps_by_hand, steps_by_factor, steps_in_the_wild  # whose import fills WRONG and RIGHT

FIRST_OF_KIND = {kind: name for name, (kind, _) in reversed(WRONG.items())}.values()
# Alone notices a backward pass that is taken for a change of gradients.
QUICK = {*FIRST_OF_KIND, "skipped_by_the_scaled_loss", "zeroed_before_each_micro_batch"}


# Each run starts a dozen processes: one of each kind is quick, the others are slow.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WRONG]
)
def test_a_wrong_step_is_reported_with_its_line(name: str) -> None:
    kind, function = WRONG[name]
    run = run_as_written(function, half="fp16" in kind)
    assert {(each.kind, each.line) for each in run.findings} == {(kind, marked_line(function))}


@pytest.mark.parametrize("name", thinned(RIGHT))
def test_a_right_step_is_not_reported(name: str) -> None:
    run = run_as_written(RIGHT[name])
    assert (run.findings, run.failure) == ([], None)
    assert len(run.losses) == STEPS


def test_the_step_as_written_is_the_first_recipe_and_its_findings_come_first() -> None:
    loop = Loop()
    found = auditor.rehearse(partial(steps_by_calls.norm_clipped_while_scaled, loop), classes(4), 3, remedies=False)
    run, first = found.runs["as_written"], found.problems[0]
    assert next(iter(found.runs)) == "as_written"
    assert run.recipe.title == "as written: FP16 under autocast, GradScaler"
    assert run.scale == 65536
    assert (first.recipe, first.kind) == ("as_written", "clip-before-unscale")
    assert first.line.startswith("steps_by_calls.py:")
    assert found.recommendation.startswith(f"As written, the step has {len(found.problems_of('as_written'))} problems")
    assert f"the first is clip-before-unscale ({first.line})" in found.recommendation
    assert found.recommended != "as_written"
    assert found.to_dict()["problems"][0]["line"] == first.line
    verdict = next(block for block in overview(found) if isinstance(block, Prose) and block.label == "Verdict")
    assert "the first is clip-before-unscale" in verdict.texts[0]
    assert first.line in render(found)
    assert loop.scaler.get_scale() == 65536


def test_a_right_step_is_recommended_as_written() -> None:
    found = auditor.rehearse(partial(steps_by_calls.usual, Loop()), classes(4), 3, remedies=False)
    assert found.recommended == "as_written"
    assert found.recommendation.startswith("Train as written: FP16 under autocast, GradScaler. The final loss is")
    assert found.runs["as_written"].losses == pytest.approx(found.runs["fp16_autocast"].losses, rel=1e-3)


def test_an_exception_as_written_keeps_the_findings() -> None:
    run = run_as_written(steps_by_calls.unscaled_twice)
    assert "RuntimeError: unscale_() has already been called" in str(run.failure)
    assert run.losses == []


def test_a_scaler_that_torch_disabled_without_cuda_scales_in_an_fp16_step() -> None:
    loop = Loop()
    with pytest.warns(UserWarning, match="not available"):
        loop.scaler = torch.amp.GradScaler("cuda")
    step = partial(steps_by_calls.norm_clipped_while_scaled, loop)
    session = Session(lambda x, y: step(x, y), lambda: cycle(enumerate(classes(2))), 0)
    run: RecipeRun = call_forked(partial(session.run, *recipe_as_written(session), 2))
    assert (run.scale, [each.kind for each in run.findings]) == (65536, ["clip-before-unscale"])
    assert not loop.scaler.is_enabled()


def one_step(model: nn.Module, loss_fn: Callable[..., torch.Tensor] = F.cross_entropy) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_an_operation_that_fails_in_fp32_is_named() -> None:
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + torch.full((16,), -torch.inf).masked_fill(torch.ones(16).bool(), 0)
            return self.a(x / x.norm(dim=-1, keepdim=True))

    batches = classes(1)
    batches[0][0][3] = 0
    with refused(AuditorError, "bad-step", match=r"NaN in step 0 \(batch 0\), first at div \(test_as_written.py:\d+\)"):
        auditor.rehearse(one_step(Row()), batches, 2, remedies=False)


def test_buffers_are_put_back_before_the_search() -> None:
    """The overflow itself changes the buffer, so that no second pass overflows: 1 / Inf is 0."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 4)
            self.register_buffer("size", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x / self.size.clone()
            square = (x @ x.T).abs().max()
            self.size.copy_(square)
            return self.a(x) * square / square

    x, y = classes(1)[0]
    run = auditor.rehearse(one_step(Running()), [(x * 300, y)], 1, remedies=False).runs["fp16_autocast"]
    assert run.skipped[0].where.startswith("matmul (test_as_written.py:")


def test_a_loss_that_is_nan_with_finite_gradients_names_its_operation() -> None:
    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + ((out.detach().abs() + 3e4) * 3 * 0).mean()

    found = auditor.rehearse(one_step(mlp(16, 4), loss_fn), classes(2), 2, remedies=False)
    problem = next(each for each in found.problems if each.kind == "loss-not-finite")
    assert problem.recipe == "fp16_autocast"
    assert "in 2 of 2 steps" in problem.text
    assert "first appears at mul (test_as_written.py:" in problem.text
    assert not any(each.kind == "loss-behind" for each in found.problems_of(problem.recipe))


def test_a_loss_that_looks_better_than_in_fp32_at_the_same_weights_is_a_problem() -> None:
    fp32 = RecipeRun(FP32, [0.5, 0.5])
    low = RecipeRun(
        Recipe("bf16", "BF16", "bf16"), [0.5, 0.1], steps=[0, 1], errors=[0.0, 0.0], exact_losses=[0.5, 0.5]
    )
    (problem,) = problems_of("bf16", {"fp32": fp32, "bf16": low})
    assert problem.kind == "loss-off"
    assert problem.text == "the loss is 0.1, in FP32 0.5 at the same weights, so that it looks better than it is"
    low.exact_losses = [0.5, 0.11]
    assert list(problems_of("bf16", {"fp32": fp32, "bf16": low})) == []


def test_a_loss_is_behind_only_if_the_weights_are() -> None:
    """A frozen teacher in BF16 has other targets than in FP32, which the weights reach as well."""
    fp32 = RecipeRun(FP32, [1.0, 0.5, 0.4, 0.4])
    low = RecipeRun(Recipe("bf16", "BF16", "bf16"), [1.0, 0.55, 0.47, 0.47], steps=[2, 3], errors=[0.0, 0.0])
    low.exact_losses = [0.4, 0.401]
    assert list(problems_of("bf16", {"fp32": fp32, "bf16": low})) == []
    low.exact_losses = [0.47, 0.47]
    assert [each.kind for each in problems_of("bf16", {"fp32": fp32, "bf16": low})] == ["loss-behind"]


@pytest.mark.parametrize("steps", [3, 8])
def test_a_run_that_skipped_its_first_step_is_one_step_late_and_not_behind(steps: int) -> None:
    losses = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1][:steps]
    fp32 = RecipeRun(FP32, losses)
    low = RecipeRun(Recipe("fp16", "FP16", "fp16"), [1.0, *losses[:-1]], scale=32768.0)
    low.skipped = [NonFiniteStep(0, 0, 65536.0)]
    assert list(problems_of("fp16", {"fp32": fp32, "fp16": low})) == []
    assert (
        f"1 of {steps} steps is skipped until the loss scale settles" in recommend({"fp32": fp32, "fp16": low}, [])[1]
    )
    low.skipped = []
    assert [each.kind for each in problems_of("fp16", {"fp32": fp32, "fp16": low})] == ["loss-behind"]


def test_consequences_of_a_wrong_scale_are_no_problems_of_their_own() -> None:
    """Clamped to a share of the scale, gradients differ from FP32's; but no module has to stay in FP32 for that."""
    found = auditor.rehearse(partial(steps_by_hand.each_gradient_normalized, Loop()), classes(4), 3, remedies=False)
    kinds = {problem.kind for problem in found.problems_of("as_written")}
    assert "change-before-unscale" in kinds
    assert kinds <= {"change-before-unscale", "loss-behind"}


@pytest.mark.parametrize(("factor", "said"), [(1.0, "though not yet: up to"), (1e-5, "of their norm is lost: use")])
def test_fp16_without_a_scaler_says_how_much_underflows(factor: float, said: str) -> None:
    def step(s: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        s.opt.zero_grad()
        (s.loss(x, y) * factor).backward()
        s.opt.step()

    (finding,) = run_as_written(step).findings
    assert finding.kind == "no-scaler"
    assert said in finding.text


def test_an_exception_in_a_closure_with_a_scaler_names_the_line() -> None:
    def step(s: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            return s.begin(x, y)

        s.scaler.scale(torch.zeros(()))
        s.scaler.step(s.opt, closure=closure)  # <-

    run = run_as_written(step)
    assert "Closure use is not currently supported" in str(run.failure)
    assert marked_line(step) in str(run.failure)


def test_fp16_copies_of_fp32_weights_make_a_step_as_written() -> None:
    """Masters in FP32 are what the optimizer has; the model in FP16 gets the gradients."""
    model = mlp(16, 8, 4).half()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        (loss * 512).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float() / 512
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        return loss.detach()

    session = Session(step, lambda: cycle(enumerate(classes(2))), 0)
    (recipe,) = recipe_as_written(session)
    assert recipe.title == "as written: weights in FP16"
    run: RecipeRun = call_forked(partial(session.run, recipe, 2))
    assert (run.findings, run.failure) == ([], None)
