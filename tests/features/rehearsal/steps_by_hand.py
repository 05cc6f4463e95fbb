"""Steps that change, read or lose gradients by hand, right and wrong: the update depends on the loss scale, an overflow is not
survived, or low precision discards what the step keeps."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from tests.features.rehearsal.cases import mlp
from tests.features.rehearsal.stepping import Loop, right, wrong


def gradients_of(s: Loop) -> list[torch.Tensor]:
    return [p.grad for p in s.model.parameters() if p.grad is not None]


def norm_of(s: Loop) -> torch.Tensor:
    return torch.stack([x.norm() for x in gradients_of(s)]).norm()


# Wrong steps; the finding is of the line with the mark "# <-".


@wrong("change-before-unscale")
def norm_limited_by_hand(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    factor = 0.1 / (float(norm_of(s)) + 1e-6)
    if factor < 1:
        for gradient in gradients_of(s):
            gradient.mul_(factor)  # <-
    s.end()


@wrong("change-before-unscale")
def entries_clamped_through_data(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for p in s.model.parameters():
        p.grad.data.clamp_(-1, 1)  # <-
    s.end()


@wrong("change-before-unscale")
def norm_limited_by_foreach(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients_of(s))))
    torch._foreach_mul_(gradients_of(s), (0.1 / norm).clamp(max=1.0))  # <-
    s.end()


@wrong("change-before-unscale")
def limited_by_two_functions_of_torch(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    norm = nn.utils.get_total_norm(gradients_of(s))
    nn.utils.clip_grads_with_norm_(s.model.parameters(), 0.1, norm)  # <-
    s.end()


@wrong("change-before-unscale")
def each_gradient_normalized(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for p in s.model.parameters():
        p.grad = p.grad / (p.grad.norm() + 1e-12)  # <-
    s.end()


@wrong("change-before-unscale")
def averaged_and_then_clamped(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(16), y.split(16), strict=True):
        s.scaler.scale(s.loss(part, target)).backward()
    for gradient in gradients_of(s):
        gradient /= 2
        torch.clamp(gradient, -1, 1, out=gradient)  # <-
    s.end()


@wrong("change-before-unscale")
def decay_added_to_scaled_gradients(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for p in s.model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)  # <-
    s.end()


@wrong("change-before-unscale")
def noise_added_to_scaled_gradients(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for gradient in gradients_of(s):
        gradient += 0.1 * torch.randn_like(gradient)  # <-
    s.end()


@wrong("change-before-unscale")
def signs_of_scaled_gradients(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for gradient in gradients_of(s):
        gradient.sign_()  # <-
    s.end()


@wrong("change-before-unscale")
def the_other_optimizer_unscaled_before_a_limit_by_hand(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.begin_other(x, y)
    s.scaler.unscale_(s.opt2)
    for gradient in gradients_of(s):
        gradient.clamp_(-0.01, 0.01)  # <-
    s.scaler.step(s.opt2)
    s.end()


@wrong("hook-on-scaled-gradients")
def a_hook_that_clamps(s: Loop, x: Any, y: Any) -> None:
    if not s.calls:
        for p in s.model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-1, 1))  # <-
    s.calls += 1
    s.begin(x, y)
    s.end()


@wrong("loss-not-scaled")
def a_second_loss_without_the_scale(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    decay = sum(p.square().sum() for p in s.model.parameters())
    (s.scaler.scale(s.loss(x, y)) + decay).backward()  # <-
    s.end()


@wrong("loss-not-scaled")
def stepped_without_scale(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.loss(x, y).backward()  # <-
    s.end()


@wrong("update-with-scaled-gradients")
def gradients_assigned_with_their_scale(s: Loop, x: Any, y: Any) -> None:
    parameters = [*s.model.parameters()]
    gradients = torch.autograd.grad(s.scaler.scale(s.loss(x, y)), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    s.opt.step()  # <-


@wrong("unscale-twice")
def divided_by_hand_and_by_the_scaler(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for gradient in gradients_of(s):
        gradient.div_(s.scaler.get_scale())  # <-
    s.end()


@wrong("decided-by-scaled-value")
def skipped_by_the_norm_of_scaled_gradients(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    if norm_of(s) < 100:  # <-
        s.scaler.step(s.opt)
    s.scaler.update()


@wrong("decided-by-scaled-value")
def skipped_by_the_scaled_loss(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    loss = s.scaler.scale(s.loss(x, y))
    if loss.item() > 100:  # <-
        return
    loss.backward()
    s.end()


@wrong("overflow-hidden")
def infinite_gradients_replaced(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for p in s.model.parameters():
        torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)  # <-
    s.end()


@wrong("fails-on-overflow")
def an_infinite_norm_raises(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    clip_grad_norm_(s.model.parameters(), 1.0, error_if_nonfinite=True)  # <-
    s.end()


@wrong("fails-on-overflow")
def an_infinite_norm_is_asserted_away(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    assert torch.isfinite(norm_of(s))  # <-
    s.end()


@wrong("overflow-not-counted")
def an_overflow_ends_the_step(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    if not torch.isfinite(norm_of(s)):  # <-
        s.opt.zero_grad()
        return
    s.end()


@wrong("update-not-skipped")
def unscaled_by_hand_without_a_check(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for p in s.model.parameters():
        p.grad /= s.scaler.get_scale()
    s.opt.step()  # <-


@wrong("gradients-zeroed")
def zeroed_after_backward(s: Loop, x: Any, y: Any) -> None:
    s.scaler.scale(s.loss(x, y)).backward()
    s.opt.zero_grad(set_to_none=False)  # <-
    s.end()


@wrong("gradients-zeroed")
def zeroed_after_backward_in_bf16(s: Loop, x: Any, y: Any) -> None:
    s.loss(x, y, dtype=torch.bfloat16).backward()
    s.model.zero_grad()  # <-
    s.opt.step()


@wrong("schedule-before-step")
def the_schedule_first(s: Loop, x: Any, y: Any) -> None:
    schedule = vars(s).setdefault("schedule", torch.optim.lr_scheduler.StepLR(s.opt, 1, 0.9))
    schedule.step()  # <-
    s.begin(x, y)
    s.end()


@wrong("schedule-before-step")
def the_schedule_between_backward_and_step(s: Loop, x: Any, y: Any) -> None:
    schedule = vars(s).setdefault("schedule", torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(s.opt, 3))
    s.begin(x, y)
    schedule.step()  # <-
    s.end()


@wrong("update-before-step")
def updated_after_each_micro_batch(s: Loop, x: Any, y: Any) -> None:
    s.begin_other(x, y)
    s.opt.zero_grad()
    for part, target in zip(x.split(16), y.split(16), strict=True):
        s.scaler.scale(s.loss(part, target) / 2).backward()
        if s.opt2 is not None:
            s.scaler.step(s.opt2)
            s.scaler.update()  # <-
            s.opt2.zero_grad()
            s.scaler.scale(s.loss(part, target, s.other)).backward()
    s.end()


@wrong("state-lost")
def an_average_of_weights_in_fp16(s: Loop, x: Any, y: Any) -> None:
    average = vars(s).setdefault("average", mlp(16, 8, 4).half().requires_grad_(False))
    s.begin(x, y)
    s.end()
    with torch.no_grad():
        for kept, p in zip(average.parameters(), s.model.parameters(), strict=True):
            kept.mul_(0.999).add_(p, alpha=0.001)  # <-


@wrong("state-lost")
def an_average_in_a_dict_in_bf16(s: Loop, x: Any, y: Any) -> None:
    first = {name: p.detach().bfloat16() for name, p in s.model.named_parameters()}
    average = vars(s).setdefault("average", first)
    s.begin(x, y)
    s.end()
    with torch.no_grad():
        weights = [p.bfloat16() for p in s.model.parameters()]
        torch._foreach_lerp_([*average.values()], weights, 0.001)  # <-


@wrong("state-lost")
def an_average_that_is_copied(s: Loop, x: Any, y: Any) -> None:
    average = vars(s).setdefault("average", [p.detach().half() for p in s.model.parameters()])
    s.begin(x, y)
    s.end()
    for kept, p in zip(average, s.model.parameters(), strict=True):
        kept.copy_(0.999 * kept + 0.001 * p.detach().half())  # <-


@wrong("nothing-low")
def a_region_around_the_loss_alone(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    out = s.model(x)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(out, y)  # <-
    s.scaler.scale(loss).backward()
    s.end()


@wrong("state-lost")
def an_average_that_is_replaced_in_a_dict(s: Loop, x: Any, y: Any) -> None:
    first = {name: p.detach().half() for name, p in s.model.named_parameters()}
    average = vars(s).setdefault("average", first)
    s.begin(x, y)
    s.end()
    for name, p in s.model.named_parameters():
        average[name] = (0.9999 * average[name].float() + 0.0001 * p.detach()).half()  # <-


@wrong("state-lost")
def an_average_assigned_through_data(s: Loop, x: Any, y: Any) -> None:
    average = vars(s).setdefault("average", mlp(16, 8, 4).bfloat16().requires_grad_(False))
    s.begin(x, y)
    s.end()
    for kept, p in zip(average.parameters(), s.model.parameters(), strict=True):
        kept.data = 0.999 * kept.data + 0.001 * p.data.bfloat16()  # <-


@wrong("update-with-scaled-gradients")
def weights_moved_by_scaled_gradients(s: Loop, x: Any, y: Any) -> None:
    """Sharpness-aware minimization without the division by the norm."""
    s.begin(x, y)
    weights = [*s.model.parameters()]
    moves = [1e-3 * gradient for gradient in gradients_of(s)]
    with torch.no_grad():
        torch._foreach_add_(weights, moves)  # <-
    s.begin(x, y)
    with torch.no_grad():
        torch._foreach_sub_(weights, moves)
    s.end()


@wrong("gradients-zeroed")
def gradients_set_to_zero_by_hand_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    for gradient in gradients_of(s):
        gradient.zero_()  # <-
    s.end()


@wrong("hook-on-scaled-gradients")
def a_hook_of_a_module_that_clamps(s: Loop, x: Any, y: Any) -> None:
    if not s.calls:
        s.model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0].clamp(-0.01, 0.01),))  # <-
    s.calls += 1
    s.begin(x, y)
    s.end()


@wrong("decided-by-scaled-value")
def a_rate_chosen_by_the_norm_of_scaled_gradients(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    rate = min(0.1, 1.0 / float(norm_of(s)))  # <-
    for group in s.opt.param_groups:
        group["lr"] = rate
    s.end()


@wrong("change-before-unscale")
def small_entries_of_scaled_gradients_set_to_zero(s: Loop, x: Any, y: Any) -> None:
    """The norm of a gradient stays almost the same."""
    s.begin(x, y)
    for gradient in gradients_of(s):
        gradient[gradient.abs() < 1e-3] = 0  # <-
    s.end()


@wrong("gradients-zeroed")
def zeroed_before_each_micro_batch(s: Loop, x: Any, y: Any) -> None:
    for part, target in zip(x.split(8), y.split(8), strict=True):
        s.opt.zero_grad()  # <-
        s.scaler.scale(s.loss(part, target) / 4).backward()
    s.end()


@wrong("scaler-recreated")
def the_state_of_the_scaler_loaded_in_each_step(s: Loop, x: Any, y: Any) -> None:
    state = vars(s).setdefault("state", s.scaler.state_dict())
    s.scaler.load_state_dict(state)  # <-
    s.begin(x, y)
    s.end()


@wrong("state-lost")
def a_memory_bank_in_fp16(s: Loop, x: Any, y: Any) -> None:
    bank = vars(s).setdefault("bank", torch.randn(len(x), 4).half())
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        z = s.model(x)
        loss = F.cross_entropy(z @ bank.T, torch.arange(len(x)))
    s.scaler.scale(loss).backward()
    s.end()
    with torch.no_grad():
        bank.mul_(0.9999).add_(z.detach() * 0.0001)  # <-


@wrong("update-depends-on-scale")
def a_further_update_by_hand_divided_once_more(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    s.end()
    last = s.model[2].weight
    with torch.no_grad():
        last.sub_(last.grad / s.scaler.get_scale(), alpha=0.1)  # <-


@wrong("outdated-weights")
def an_inner_loop_in_one_region(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(2):
            gradients = torch.autograd.grad(F.cross_entropy(s.model(x), y), [*s.model.parameters()])  # <-
            with torch.no_grad():
                torch._foreach_sub_([*s.model.parameters()], gradients)
    s.loss(x, y, dtype=torch.bfloat16).backward()
    s.opt.step()


@wrong("outdated-weights")
def a_second_loss_in_the_region_of_the_first_update(s: Loop, x: Any, y: Any) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        first = F.cross_entropy(s.model(x), y)
        with torch.autocast("cuda", enabled=False):
            s.opt.zero_grad()
            first.backward()
            s.opt.step()
        s.opt2.zero_grad()
        second = F.cross_entropy(s.other(x) + s.model(x).detach(), y)  # <-
    second.backward()
    s.opt2.step()


# Right steps.


@right
def norm_limited_by_hand_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    factor = 0.1 / (norm_of(s) + 1e-6)
    for gradient in gradients_of(s):
        gradient.mul_(factor.clamp(max=1.0))
    s.end()


@right
def clamped_through_data_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    for p in s.model.parameters():
        p.grad.data.clamp_(-0.01, 0.01)
    s.end()


@right
def limited_by_foreach_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    norm = nn.utils.get_total_norm(gradients_of(s))
    nn.utils.clip_grads_with_norm_(s.model.parameters(), 0.1, norm)
    torch._foreach_mul_(gradients_of(s), 0.5)
    s.end()


@right
def a_norm_limited_to_a_scaled_limit(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    factor = (0.1 * s.scaler.get_scale() / norm_of(s)).clamp(max=1.0)
    for gradient in gradients_of(s):
        gradient.mul_(factor)
    s.end()


@right
def scaled_gradients_averaged(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(8), y.split(8), strict=True):
        s.scaler.scale(s.loss(part, target)).backward()
    for p in s.model.parameters():
        p.grad = p.grad / 4
    s.end()


@right
def scaled_gradients_masked_and_centred(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for gradient in gradients_of(s):
        gradient.mul_((torch.arange(gradient.numel()) % 3 > 0).view_as(gradient))
        gradient.sub_(gradient.mean())
    s.end()


@right
def a_hook_that_doubles(s: Loop, x: Any, y: Any) -> None:
    if not s.calls:
        s.model[0].weight.register_hook(lambda gradient: 2 * gradient)
    s.calls += 1
    s.begin(x, y)
    s.end()


@right
def decay_and_noise_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    for p in s.model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)
        p.grad += 0.1 * torch.randn_like(p.grad)
    s.end()


@right
def signs_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    for gradient in gradients_of(s):
        gradient.sign_()
    s.end()


@right
def losses_added_before_the_scale(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    decay = sum(p.square().sum() for p in s.model.parameters())
    s.scaler.scale(s.loss(x, y) + decay).backward()
    s.end()


@right
def the_norm_of_scaled_gradients_is_printed(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    print(float(norm_of(s)), s.scaler.get_scale())
    s.end()


@right
def a_batch_with_a_large_loss_left_out(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    loss = s.loss(x, y)
    if loss.item() > 100 or not torch.isfinite(loss):
        return
    s.scaler.scale(loss).backward()
    s.end()


@right
def a_large_norm_left_out_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    if norm_of(s) < 100:
        s.scaler.step(s.opt)
    s.scaler.update()


@right
def an_infinite_norm_is_counted(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    if not torch.isfinite(norm_of(s)):
        s.calls += 1
    s.end()


@right
def infinite_gradients_replaced_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    for p in s.model.parameters():
        torch.nan_to_num(p.grad, out=p.grad)
    s.end()


@right
def the_schedule_last(s: Loop, x: Any, y: Any) -> None:
    schedule = vars(s).setdefault("schedule", torch.optim.lr_scheduler.StepLR(s.opt, 1, 0.9))
    before = s.scaler.get_scale()
    s.begin(x, y)
    s.end()
    if s.scaler.get_scale() >= before:
        schedule.step()


@right
def the_schedule_of_an_accumulated_step(s: Loop, x: Any, y: Any) -> None:
    schedule = vars(s).setdefault("schedule", torch.optim.lr_scheduler.OneCycleLR(s.opt, 0.1, total_steps=9))
    s.opt.zero_grad()
    for part, target in zip(x.split(16), y.split(16), strict=True):
        s.scaler.scale(s.loss(part, target) / 2).backward()
    s.end()
    schedule.step()


@right
def zeroed_before_the_second_backward(s: Loop, x: Any, y: Any) -> None:
    s.scaler.scale(s.loss(x, y)).backward()
    s.begin(x, y)
    s.end()


@right
def zeroed_after_the_step(s: Loop, x: Any, y: Any) -> None:
    s.scaler.scale(s.loss(x, y)).backward()
    s.end()
    s.opt.zero_grad()


@right
def an_average_of_weights_in_fp32(s: Loop, x: Any, y: Any) -> None:
    average = vars(s).setdefault("average", mlp(16, 8, 4).requires_grad_(False))
    s.begin(x, y)
    s.end()
    with torch.no_grad():
        for kept, p in zip(average.parameters(), s.model.parameters(), strict=True):
            kept.mul_(0.999).add_(p, alpha=0.001)


@right
def a_copy_of_weights_in_fp16(s: Loop, x: Any, y: Any) -> None:
    average = vars(s).setdefault("average", mlp(16, 8, 4).half().requires_grad_(False))
    s.begin(x, y)
    s.end()
    with torch.no_grad():
        for kept, p in zip(average.parameters(), s.model.parameters(), strict=True):
            kept.copy_(p)


@right
def a_region_around_the_model_alone(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = s.model(x)
    s.scaler.scale(F.cross_entropy(out.float(), y)).backward()
    s.end()


@right
def a_cast_by_hand_whose_gradients_underflow_without_a_scale(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = s.model(x)
    s.scaler.scale(F.cross_entropy(out.half().float(), y) * 1e-4).backward()
    s.end()


@right
def a_queue_in_fp16_that_is_replaced(s: Loop, x: Any, y: Any) -> None:
    queue = vars(s).setdefault("queue", [torch.zeros(64, 16).half()])
    s.begin(x, y)
    s.end()
    queue[0] = torch.cat([queue[0][len(x) :], x.half()])
    queue[0] = queue[0].roll(1, 0)


@right
def a_running_mean_in_fp16_that_is_replaced(s: Loop, x: Any, y: Any) -> None:
    mean = vars(s).setdefault("mean", [torch.zeros(16).half()])
    s.begin(x, y)
    s.end()
    mean[0] = 0.5 * mean[0] + 0.5 * x.mean(0).half()


@right
def weights_moved_along_normalized_gradients(s: Loop, x: Any, y: Any) -> None:
    """Sharpness-aware minimization."""
    s.begin(x, y)
    weights = [*s.model.parameters()]
    norm = norm_of(s).nan_to_num(nan=torch.inf, posinf=torch.inf)
    moves = [(0.05 * gradient / (norm + 1e-12)).nan_to_num(0) for gradient in gradients_of(s)]
    with torch.no_grad():
        torch._foreach_add_(weights, moves)
    s.begin(x, y)
    with torch.no_grad():
        torch._foreach_sub_(weights, moves)
    s.end()


@right
def gradients_of_two_losses_projected(s: Loop, x: Any, y: Any) -> None:
    """PCGrad: a projection does not depend on the scale of both gradients."""
    flat = list[torch.Tensor]()
    for sign in (1, -1):
        s.begin(sign * x, y)
        flat.append(torch.cat([gradient.flatten() for gradient in gradients_of(s)]))
    first, second = flat
    if first @ second < 0:
        first = first - (first @ second) / (second @ second) * second
    sizes = [p.numel() for p in s.model.parameters()]
    for p, part in zip(s.model.parameters(), (first + second).split(sizes), strict=True):
        p.grad = part.view_as(p).clone()
    s.end()


@right
def small_entries_of_gradients_set_to_zero_relative_to_the_largest(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    for gradient in gradients_of(s):
        gradient[gradient.abs() < 0.01 * gradient.abs().max()] = 0
    s.end()


@right
def a_rate_chosen_by_the_norm_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    rate = min(0.1, 1.0 / float(norm_of(s)))
    for group in s.opt.param_groups:
        group["lr"] = rate
    s.end()


@right
def keys_in_fp16_that_the_next_step_compares(s: Loop, x: Any, y: Any) -> None:
    """A queue, as in momentum contrast, whose products FP32 has to compute, too."""
    keys = vars(s).setdefault("keys", [F.normalize(torch.randn(64, 4), dim=-1).half()])
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        z = F.normalize(s.model(x), dim=-1)
        loss = F.cross_entropy(z @ keys[0].T / 0.1, y)
    s.scaler.scale(loss).backward()
    s.end()
    keys[0] = torch.cat([keys[0][len(x) :], z.detach().half()])


@right
def weights_that_are_averaged_every_second_step(s: Loop, x: Any, y: Any) -> None:
    """Lookahead."""
    slow = vars(s).setdefault("slow", [p.detach().clone() for p in s.model.parameters()])
    s.begin(x, y)
    s.end()
    s.calls += 1
    if s.calls % 2 == 0:
        with torch.no_grad():
            for kept, p in zip(slow, s.model.parameters(), strict=True):
                kept.lerp_(p, 0.5)
                p.copy_(kept)


@right
def an_inner_loop_with_a_region_in_each_pass(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for _ in range(2):
        loss = s.loss(x, y, dtype=torch.bfloat16)
        gradients = torch.autograd.grad(loss, [*s.model.parameters()])
        with torch.no_grad():
            torch._foreach_sub_([*s.model.parameters()], gradients, alpha=0.1)
    s.loss(x, y, dtype=torch.bfloat16).backward()
    s.opt.step()
