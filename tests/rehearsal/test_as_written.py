"""The step as written: its own regions, scalers and calls, and a finding with its line for each call that does not fit."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import auditor
from auditor.errors import AuditorError
from auditor.rehearsal.rehearse import problems_of, recipe_as_written
from auditor.rehearsal.result import FP32, Recipe, RecipeRun
from auditor.rehearsal.session import Session, call_forked
from auditor.report.blocks import Prose
from auditor.report.rehearsal import overview, render
from tests.rehearsal.cases import classes, mlp
from tests.rehearsal.stepping import STEPS, Loop, Step, marked_line, run_as_written
from tests.support.refusing import refused

WRONG: dict[str, tuple[str, Step]] = {}
RIGHT: dict[str, Step] = {}


def wrong(kind: str) -> Callable[[Step], Step]:
    def keep(step: Step) -> Step:
        WRONG[step.__name__] = kind, step
        return step

    return keep


def right(step: Step) -> Step:
    RIGHT[step.__name__] = step
    return step


# Wrong steps; the finding is of the line with the mark "# <-".


@wrong("clip-before-unscale")
def norm_clipped_while_scaled(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    clip_grad_norm_(s.model.parameters(), 1.0)  # <-
    s.end()


@wrong("clip-before-unscale")
def value_clipped_while_scaled(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    nn.utils.clip_grad_value_(s.model.parameters(), clip_value=0.5)  # <-
    s.end()


@wrong("clip-before-unscale")
def the_other_optimizer_unscaled(s: Loop, x: Any, y: Any) -> None:
    s.opt2.zero_grad()
    s.begin(x, y)
    s.scaler.scale(s.loss(x, y, s.other)).backward()
    s.scaler.unscale_(s.opt2)
    clip_grad_norm_(s.model.parameters(), 1.0)  # <-
    s.scaler.step(s.opt2)
    s.end()


@wrong("clip-after-step")
def clipped_after_the_step(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.step(s.opt)
    clip_grad_norm_(s.model.parameters(), 1.0)  # <-
    s.scaler.update()


@wrong("unscale-twice")
def unscaled_twice(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    clip_grad_norm_(s.model.parameters(), 1.0)
    s.scaler.unscale_(s.opt)  # <-
    s.end()


@wrong("unscale-after-step")
def unscaled_after_the_step(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.step(s.opt)
    s.scaler.unscale_(s.opt)  # <-
    s.scaler.update()


@wrong("no-update")
def never_updated(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.step(s.opt)  # <-


@wrong("no-update")
def never_updated_after_clipping(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    clip_grad_norm_(s.model.parameters(), 1.0)
    s.scaler.step(s.opt)  # <-


@wrong("update-before-step")
def one_scaler_updated_between_two_optimizers(s: Loop, x: Any, y: Any) -> None:
    s.opt2.zero_grad()
    s.begin(x, y)
    s.scaler.scale(s.loss(x, y, s.other)).backward()
    s.scaler.step(s.opt)
    s.scaler.update()  # <-
    s.scaler.step(s.opt2)
    s.scaler.update()


@wrong("update-before-step")
def updated_before_the_step(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    s.scaler.update()  # <-
    s.scaler.step(s.opt)


@wrong("shared-scaler")
def one_scaler_for_an_optimizer_that_overflows(s: Loop, x: Any, y: Any) -> None:
    s.opt2.zero_grad()
    s.begin(x, y)
    s.scaler.scale(s.loss(x, y, s.other) * 1e9).backward()
    s.scaler.step(s.opt2)  # <-
    s.end()


@wrong("other-scaler")
def stepped_by_another_scaler(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler2.scale(torch.ones(()))
    s.scaler2.step(s.opt)  # <-
    s.scaler2.update()


@wrong("fp16-parameters")
def fp16_parameters(s: Loop, x: Any, y: Any) -> None:
    s.begin(x.half(), y)
    s.scaler.unscale_(s.opt)  # <-
    s.end()


@wrong("inner-gradients-not-scaled")
def gradient_penalty_without_a_scale(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(loss, x, create_graph=True)  # <-
    s.scaler.scale(loss + inner.square().sum()).backward()
    s.end()


@wrong("inner-gradients-scaled")
def gradient_penalty_that_stays_scaled(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(s.scaler.scale(loss), x, create_graph=True)  # <-
    s.scaler.scale(loss + inner.square().sum()).backward()
    s.end()


@wrong("backward-in-autocast")
def backward_in_the_region(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        s.scaler.scale(F.cross_entropy(s.model(x), y)).backward()  # <-
    s.end()


@wrong("loss-divided-twice")
def loss_divided_twice(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(8), y.split(8), strict=True):
        loss = s.loss(part, target) / 4
        s.scaler.scale(loss / 4).backward()  # <-
    s.end()


@wrong("update-with-scaled-gradients")
def step_past_the_scaler(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.opt.step()  # <-


@wrong("update-not-skipped")
def step_past_the_scaler_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    s.opt.step()  # <-
    s.scaler.update()


@wrong("loss-not-scaled")
def loss_without_its_scale(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    loss = s.loss(x, y)
    s.scaler.scale(loss)
    loss.backward()  # <-
    s.end()


@wrong("loss-not-scaled")
def one_of_two_losses_without_its_scale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.loss(x, y).backward()  # <-
    s.end()


@wrong("no-scaler")
def fp16_without_a_scaler(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.loss(x, y).backward()  # <-
    s.opt.step()


@wrong("no-scaler")
def fp16_with_a_disabled_scaler(s: Loop, x: Any, y: Any) -> None:
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    s.opt.zero_grad()
    scaler.scale(s.loss(x, y)).backward()  # <-
    scaler.step(s.opt)
    scaler.update()


@wrong("backward-after-unscale")
def backward_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    s.scaler.scale(s.loss(x, y)).backward()  # <-
    s.scaler.update()
    s.end()


@wrong("gradients-kept")
def gradients_never_zeroed(s: Loop, x: Any, y: Any) -> None:
    s.scaler.scale(s.loss(x, y)).backward()  # <-
    s.end()


@wrong("updated-twice")
def updated_twice(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.step(s.opt)
    s.opt.step()  # <-
    s.scaler.update()


@wrong("scaler-recreated")
def a_new_scaler_in_each_step(s: Loop, x: Any, y: Any) -> None:
    scaler = torch.amp.GradScaler("cuda")  # <-
    s.opt.zero_grad()
    scaler.scale(s.loss(x, y)).backward()
    scaler.step(s.opt)
    scaler.update()


@wrong("scaled-loss")
def returns_the_scaled_loss(s: Loop, x: Any, y: Any) -> Any:
    s.opt.zero_grad()
    loss = s.scaler.scale(s.loss(x, y))  # <-
    loss.backward()
    s.end()
    return loss.item()


# Right steps.


@right
def usual(s: Loop, x: Any, y: Any) -> Any:
    loss = s.begin(x, y)
    s.end()
    return loss


@right
def clipped(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    clip_grad_norm_(s.model.parameters(), 1.0)
    clip_grad_value_([*s.model.parameters()], 0.5)
    s.end()


@right
def a_norm_for_the_log(s: Loop, x: Any, y: Any) -> float:
    s.begin(x, y)
    norm = clip_grad_norm_(s.model.parameters(), float("inf"))
    s.end()
    return float(norm)


@right
def a_limit_for_scaled_gradients(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    clip_grad_norm_(s.model.parameters(), 1.0 * s.scaler.get_scale())
    s.end()


@right
def bf16_without_a_scaler(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.loss(x, y, dtype=torch.bfloat16).backward()
    clip_grad_norm_(s.model.parameters(), 1.0)
    s.opt.step()


@right
def bf16_with_a_disabled_scaler(s: Loop, x: Any, y: Any) -> None:
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    s.opt.zero_grad()
    scaler.scale(s.loss(x, y, dtype=torch.bfloat16)).backward()
    scaler.unscale_(s.opt)
    scaler.unscale_(s.opt)
    scaler.step(s.opt)
    scaler.update()


@right
def two_optimizers_one_update(s: Loop, x: Any, y: Any) -> None:
    s.opt2.zero_grad()
    s.begin(x, y)
    s.scaler.scale(s.loss(x, y, s.other)).backward()
    s.scaler.unscale_(s.opt2)
    s.scaler.step(s.opt)
    s.scaler.step(s.opt2)
    s.scaler.update()


@right
def two_optimizers_two_scalers(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.end()
    s.opt2.zero_grad()
    s.scaler2.scale(s.loss(x, y, s.other)).backward()
    s.scaler2.step(s.opt2)
    s.scaler2.update()


@right
def two_losses_of_shared_weights(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.opt2.zero_grad()
    s.scaler.scale(s.loss(x, y)).backward()
    s.scaler.scale(s.loss(s.model(x).repeat(1, 4), y, s.other)).backward()
    s.scaler.step(s.opt)
    s.scaler.step(s.opt2)
    s.scaler.update()


@right
def adversarial(s: Loop, x: Any, y: Any) -> None:
    """The second loss adds to the gradients of the first model, which are zeroed before their next use."""
    s.begin(x, y)
    s.scaler.step(s.opt)
    s.opt2.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = s.model(s.other(x).repeat(1, 4)).float().mean()
    s.scaler.scale(loss).backward()
    s.scaler.step(s.opt2)
    s.scaler.update()


@right
def accumulated_in_one_call(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(8), y.split(8), strict=True):
        s.scaler.scale(s.loss(part, target) / 4).backward()
    s.scaler.unscale_(s.opt)
    clip_grad_norm_(s.model.parameters(), 1.0)
    s.end()


@right
def accumulated_over_calls(s: Loop, x: Any, y: Any) -> None:
    s.scaler.scale(s.loss(x, y) / 2).backward()
    s.calls += 1
    if s.calls == 1 or s.calls % 2:  # a rehearsal expects an update in the first call
        s.end()
        s.opt.zero_grad()


@right
def means_by_hand_of_as_many_rows_as_passes(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part in x.split(4):
        with torch.autocast("cuda", dtype=torch.float16):
            out = s.model(part).float().square().mean(1)
        s.scaler.scale(out.sum() / 8 / 8).backward()
    s.end()


@right
def gradient_penalty(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(s.scaler.scale(loss), x, create_graph=True)
    inner = inner / s.scaler.get_scale()
    s.scaler.scale(loss + inner.square().sum()).backward()
    s.end()


@right
def gradient_penalty_in_fp32(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    (inner,) = torch.autograd.grad(s.model(x).sum(), x, create_graph=True)
    s.scaler.scale(s.loss(x, y) + inner.square().sum()).backward()
    s.end()


@right
def gradients_unscaled_by_hand(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for p in s.model.parameters():
        p.grad /= s.scaler.get_scale()
    is_finite = all(bool(p.grad.isfinite().all()) for p in s.model.parameters())
    if is_finite:
        s.opt.step()
    s.scaler.update(s.scaler.get_scale() * (1 if is_finite else 0.5))


@right
def a_constant_scale_by_hand(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    (s.loss(x, y) * 1024).backward()
    for p in s.model.parameters():
        p.grad /= 1024
    s.opt.step()


@right
def zeros_instead_of_none(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad(set_to_none=False)
    s.scaler.scale(s.loss(x, y)).backward()
    s.end()


@right
def a_batch_left_out(s: Loop, x: Any, y: Any) -> None:
    s.calls += 1
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    if s.calls % 2:
        s.scaler.step(s.opt)
    s.scaler.update()


@right
def a_fused_optimizer(s: Loop, x: Any, y: Any) -> None:
    if not s.calls:
        s.opt.defaults["fused"] = True
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    s.end()


@right
def an_fp16_teacher_of_an_fp32_student(s: Loop, x: Any, y: Any) -> None:
    with torch.no_grad():
        target = s.loss(x, y, s.other)
    s.opt.zero_grad()
    (F.cross_entropy(s.model(x), y) - target).backward()
    s.opt.step()


@right
def two_updates_of_a_loss_scale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.end()
    s.opt2.zero_grad()
    s.scaler.scale(s.loss(x, y, s.other)).backward()
    s.scaler.step(s.opt2)
    s.scaler.update()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_reported_with_its_line(name: str) -> None:
    kind, function = WRONG[name]
    run = run_as_written(function, half="fp16" in kind)
    assert (kind, marked_line(function)) in {(each.kind, each.line) for each in run.findings}
    assert {each.kind for each in run.findings} == {kind}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not_reported(name: str) -> None:
    run = run_as_written(RIGHT[name])
    assert (run.findings, run.failure) == ([], None)
    assert len(run.losses) == STEPS


def test_the_step_as_written_is_the_first_recipe_and_its_findings_come_first() -> None:
    loop = Loop()
    found = auditor.rehearse(partial(norm_clipped_while_scaled, loop), classes(4), 3, remedies=False)
    run, first = found.runs["as_written"], found.problems[0]
    assert next(iter(found.runs)) == "as_written"
    assert run.recipe.title == "as written: FP16 under autocast, GradScaler"
    assert run.scale == 65536
    assert (first.recipe, first.kind) == ("as_written", "clip-before-unscale")
    assert first.line.startswith("test_as_written.py:")
    assert found.recommendation.startswith(f"As written, the step has {len(found.problems_of('as_written'))} problems")
    assert f"the first is clip-before-unscale ({first.line})" in found.recommendation
    assert found.recommended != "as_written"
    assert found.to_dict()["problems"][0]["line"] == first.line
    verdict = next(block for block in overview(found) if isinstance(block, Prose) and block.label == "Verdict")
    assert "the first is clip-before-unscale" in verdict.texts[0]
    assert first.line in render(found)
    assert loop.scaler.get_scale() == 65536


def test_a_right_step_is_recommended_as_written() -> None:
    found = auditor.rehearse(partial(usual, Loop()), classes(4), 3, remedies=False)
    assert found.recommended == "as_written"
    assert found.recommendation.startswith("Train as written: FP16 under autocast, GradScaler. The final loss is")
    assert found.runs["as_written"].losses == pytest.approx(found.runs["fp16_autocast"].losses, rel=1e-3)


def test_an_exception_as_written_keeps_the_findings() -> None:
    run = run_as_written(unscaled_twice)
    assert "RuntimeError: unscale_() has already been called" in str(run.failure)
    assert run.losses == []


def test_a_scaler_that_torch_disabled_without_cuda_scales_in_an_fp16_step() -> None:
    loop = Loop()
    with pytest.warns(UserWarning, match="not available"):
        loop.scaler = torch.amp.GradScaler("cuda")
    step = partial(norm_clipped_while_scaled, loop)
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
