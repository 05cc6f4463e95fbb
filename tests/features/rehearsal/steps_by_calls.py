"""Steps as users write them, right and wrong, in the calls of regions, scalers, optimizers and schedules."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.features.rehearsal.stepping import Loop, right, wrong

# Wrong steps; the finding is of the line with the mark "# <-".


@wrong("clip-before-unscale")
def norm_clipped_while_scaled(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    clip_grad_norm_(s.model.parameters(), 1.0)  # <-
    s.end()


@wrong("clip-before-unscale")
def nan_clipped_while_scaled(s: Loop, x: Any, y: Any) -> None:
    """An overflow of the model hides no wrong order of calls."""
    s.opt.zero_grad()
    s.scaler.scale(s.loss(x * math.nan, y)).backward()
    clip_grad_norm_(s.model.parameters(), 1.0)  # <-
    s.end()


@wrong("clip-before-unscale")
def value_clipped_while_scaled(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    nn.utils.clip_grad_value_(s.model.parameters(), clip_value=0.5)  # <-
    s.end()


@wrong("clip-before-unscale")
def the_other_optimizer_unscaled(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.begin_other(x, y)
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
    s.begin(x, y)
    s.begin_other(x, y)
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
    """The mean over many rows makes the inner gradients smaller than FP16 numbers."""
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    with torch.autocast("cuda", dtype=torch.float16):
        mean = s.model(x).sum() / 2**24
    (inner,) = torch.autograd.grad(mean, x, create_graph=True)  # <-
    s.scaler.scale(loss + (inner * 2**24).square().sum()).backward()
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


@wrong("scaled-loss")
def returns_a_dict_with_the_scaled_loss(s: Loop, x: Any, y: Any) -> Any:
    s.opt.zero_grad()
    loss = s.scaler.scale(s.loss(x, y))  # <-
    loss.backward()
    s.end()
    return {"loss": loss.detach(), "rate": 0.1}


@wrong("no-scaler")
def fp16_gradients_assigned(s: Loop, x: Any, y: Any) -> None:
    parameters = [*s.model.parameters()]
    gradients = torch.autograd.grad(s.loss(x, y), parameters)  # <-
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    s.opt.step()


@wrong("update-with-scaled-gradients")
def a_constant_scale_that_stays(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    (s.loss(x, y) * 128).backward()
    s.opt.step()  # <-


@wrong("overflow-not-counted")
def a_loss_scale_set_in_each_step(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.step(s.opt)
    s.scaler.update(65536.0)  # <-


@wrong("inner-gradients-scaled")
def a_penalty_divided_once_after_its_square(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(s.scaler.scale(loss), x, create_graph=True)  # <-
    penalty = inner.square().sum() / s.scaler.get_scale()
    s.scaler.scale(loss + penalty).backward()
    s.end()


@wrong("inner-gradients-not-scaled")
def an_adversarial_direction_that_underflows(s: Loop, x: Any, y: Any) -> None:
    """Virtual adversarial training, whose gradient needs no graph."""
    away = (1e-3 * torch.ones_like(x)).requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        distance = (s.model(x + away) - s.model(x).detach()).square().sum() / 2**24
    (direction,) = torch.autograd.grad(distance, away)  # <-
    s.begin(x + F.normalize(direction, dim=-1), y)
    s.end()


@wrong("inner-gradients-scaled")
def a_penalty_divided_by_the_scale_of_another_scaler(s: Loop, x: Any, y: Any) -> None:
    s.opt2.zero_grad()
    s.scaler2.scale(s.loss(x, y, s.other)).backward()
    s.scaler2.step(s.opt2)
    s.scaler2.update()
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(s.scaler.scale(loss), x, create_graph=True)  # <-
    inner = inner / s.scaler2.get_scale()
    s.scaler.scale(loss + inner.square().sum()).backward()
    s.end()


@wrong("other-scaler")
def gradients_of_a_loss_of_another_scaler_are_left(s: Loop, x: Any, y: Any) -> None:
    """As of a generator's loss, which reaches the discriminator too."""
    s.opt.zero_grad()
    s.opt2.zero_grad()
    s.scaler2.scale(s.loss(x, y, s.other) + s.loss(x, y)).backward()
    s.scaler2.step(s.opt2)
    s.scaler2.update()
    s.scaler.scale(s.loss(x, y)).backward()
    s.scaler.step(s.opt)  # <-
    s.scaler.update()


@wrong("decided-by-scaled-value")
def a_schedule_that_compares_scaled_losses(s: Loop, x: Any, y: Any) -> None:
    schedule = vars(s).setdefault("schedule", torch.optim.lr_scheduler.ReduceLROnPlateau(s.opt))
    s.opt.zero_grad()
    loss = s.scaler.scale(s.loss(x, y))
    loss.backward()
    s.end()
    schedule.step(loss.item())  # <-


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
def a_norm_for_the_log_with_a_limit_that_is_never_reached(s: Loop, x: Any, y: Any) -> float:
    s.begin(x, y)
    norm = clip_grad_norm_(s.model.parameters(), 1e9)
    s.end()
    return float(norm) / s.scaler.get_scale()


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
    s.begin(x, y)
    s.begin_other(x, y)
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
def a_schedule_that_compares_losses(s: Loop, x: Any, y: Any) -> None:
    schedule = vars(s).setdefault("schedule", torch.optim.lr_scheduler.ReduceLROnPlateau(s.opt))
    loss = s.begin(x, y)
    s.end()
    schedule.step(loss)


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
def gradient_penalty_of_a_small_batch_without_a_scale(s: Loop, x: Any, y: Any) -> None:
    """Nothing underflows, so that a loss scale would change nothing."""
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(loss, x, create_graph=True)
    s.scaler.scale(loss + inner.square().sum()).backward()
    s.end()


@right
def gradient_penalty_of_the_sum_of_scores(s: Loop, x: Any, y: Any) -> None:
    """R1: each row has its own gradient, which does not depend on the number of rows."""
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        scores = s.model(x)
    (inner,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    s.scaler.scale(F.softplus(-scores).mean() + 5 * inner.square().sum(1).mean()).backward()
    s.end()


@right
def gradient_penalty_of_each_score(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        scores = s.model(x)
        (inner,) = torch.autograd.grad(scores, x, torch.ones_like(scores), create_graph=True)
    s.scaler.scale(scores.mean() + (inner.norm(dim=1) - 1).square().mean()).backward()
    s.end()


@right
def an_inner_gradient_whose_scale_cancels(s: Loop, x: Any, y: Any) -> None:
    """Only the direction of the scaled gradient counts."""
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(s.scaler.scale(loss), x, create_graph=True)
    s.scaler.scale(loss + F.normalize(inner, dim=1).sum(1).square().mean()).backward()
    s.end()


@right
def an_inner_gradient_with_a_scale_of_its_own(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y)
    (inner,) = torch.autograd.grad(loss * 1024, x, create_graph=True)
    s.scaler.scale(loss + (inner / 1024).square().sum()).backward()
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
    s.begin_other(x, y)
    s.scaler.step(s.opt2)
    s.scaler.update()


@right
def a_closure_in_bf16(s: Loop, x: Any, y: Any) -> Any:
    def closure() -> torch.Tensor:
        s.opt.zero_grad()
        loss = s.loss(x, y, dtype=torch.bfloat16)
        loss.backward()
        return loss

    return s.opt.step(closure).detach()


@right
def returns_a_dict(s: Loop, x: Any, y: Any) -> Any:
    loss = s.begin(x, y)
    s.end()
    return {"loss": loss, "scale": s.scaler.get_scale()}


@right
def a_penalty_of_gradients_in_bf16(s: Loop, x: Any, y: Any) -> None:
    x = x.clone().requires_grad_()
    s.opt.zero_grad()
    loss = s.loss(x, y, dtype=torch.bfloat16)
    (inner,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + inner.square().sum()).backward()
    s.opt.step()


@right
def losses_scaled_as_a_list(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    torch.autograd.backward(s.scaler.scale([s.loss(x, y), s.loss(-x, y)]))
    s.end()


@right
def a_loss_with_a_factor_of_one_half_in_two_passes(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(16), y.split(16), strict=True):
        loss = 0.5 * s.loss(part, target)
        s.scaler.scale(loss / 2).backward()
    s.end()


@right
def a_limit_times_the_scalers_own_scale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    scale = 1.0 if s.scaler._scale is None else float(s.scaler._scale)  # a scaler that is off has none
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.1 * scale)
    s.end()
