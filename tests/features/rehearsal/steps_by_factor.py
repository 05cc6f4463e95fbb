"""Steps that multiply their loss by a constant, without a GradScaler, and divide their gradients by it, right and wrong."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.features.rehearsal.stepping import Loop, right, wrong
from tests.features.rehearsal.steps_by_hand import gradients_of, norm_of


def begin(s: Loop, x: Any, y: Any, factor: float = 1024.0, dtype: torch.dtype = torch.float16) -> None:
    """Zero the gradients, and run a backward pass of the loss times a factor."""
    s.opt.zero_grad()
    (s.loss(x, y, dtype=dtype) * factor).backward()


def run_copies(s: Loop, x: Any, y: Any) -> tuple[nn.Module, list[nn.Parameter]]:
    """Run a backward pass of the copies in FP16; returns them, and the weights in FP32, which alone the optimizer has."""
    s.copies.zero_grad()
    (nn.functional.cross_entropy(s.copies(x.half()).float(), y) * 1024).backward()
    return s.copies, [*s.model.parameters()]


def copy_back(copies: nn.Module, masters: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, master in zip(copies.parameters(), masters, strict=True):
            p.copy_(master)


def update_masters(s: Loop, factor: float) -> None:
    """Update the FP32 copies, which are in no module, by the gradients of the FP16 model."""
    for p, master in zip(s.copies.parameters(), s.masters, strict=True):
        master.grad = p.grad.float() / factor
    s.opt4.step()
    copy_back(s.copies, s.masters)


# Wrong steps; the finding is of the line with the mark "# <-".


@wrong("divided-by-another-factor")
def divided_by_half_of_the_factor(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad /= 512  # <-
    s.opt.step()


@wrong("divided-by-another-factor")
def divided_in_an_assignment(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad = p.grad / 1000  # <-
    s.opt.step()


@wrong("divided-by-another-factor")
def divided_by_foreach_after_a_given_gradient(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.loss(x, y).backward(torch.tensor(4096.0))
    torch._foreach_div_(gradients_of(s), 1024.0)  # <-
    s.opt.step()


@wrong("divided-by-another-factor")
def divided_twice_by_the_factor(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for gradient in gradients_of(s):
        gradient.mul_(1 / 1024)
    clip_grad_norm_(s.model.parameters(), 1e9)
    for gradient in gradients_of(s):
        gradient.div_(2.0)
    begin(s, x, y)
    for gradient in gradients_of(s):
        gradient.div_(1024.0**2)  # <-
    s.opt.step()


@wrong("divided-by-another-factor")
def divided_by_the_passes_too_although_the_loss_is(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(8), y.split(8), strict=True):
        (s.loss(part, target) / 4 * 1024).backward()
    for gradient in gradients_of(s):
        gradient.div_(4 * 1024)  # <-
    s.opt.step()


@wrong("divided-by-another-factor")
def divided_by_another_factor_in_bf16(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y, 1024.0, torch.bfloat16)
    for gradient in gradients_of(s):
        gradient.div_(128)  # <-
    s.opt.step()


@wrong("change-before-unscale")
def clipped_before_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    clip_grad_norm_(s.model.parameters(), 1.0)  # <-
    for gradient in gradients_of(s):
        gradient.div_(1024)
    s.opt.step()


@wrong("change-before-unscale")
def clamped_before_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for gradient in gradients_of(s):
        gradient.clamp_(-0.1, 0.1)  # <-
    torch._foreach_div_(gradients_of(s), 1024.0)
    s.opt.step()


@wrong("update-with-scaled-gradients")
def clipped_and_never_divided(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    clip_grad_norm_(s.model.parameters(), 1.0)
    s.opt.step()  # <-


@wrong("update-with-scaled-gradients")
def limited_by_hand_and_never_divided(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    factor = (0.1 / norm_of(s)).clamp(max=1.0)
    for gradient in gradients_of(s):
        gradient.mul_(factor)
    s.opt.step()  # <-


@wrong("update-with-scaled-gradients")
def fp16_weights_whose_gradients_are_never_divided(s: Loop, x: Any, y: Any) -> None:
    s.opt3.zero_grad()
    (nn.functional.cross_entropy(s.copies(x.half()).float(), y) * 1024).backward()
    s.opt3.step()  # <-


@wrong("update-with-scaled-gradients")
def one_layer_is_not_divided(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model[0].parameters():
        p.grad.div_(1024)
    s.opt.step()  # <-


@wrong("divided-by-another-factor")
def gradients_of_copies_divided_by_another_factor(s: Loop, x: Any, y: Any) -> None:
    copies, masters = run_copies(s, x, y)
    for p, master in zip(copies.parameters(), masters, strict=True):
        master.grad = p.grad.float() / 256  # <-
    s.opt.step()
    copy_back(copies, masters)


@wrong("change-before-unscale")
def decay_added_before_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad.add_(p.detach(), alpha=5e-4)  # <-
    torch._foreach_div_(gradients_of(s), 1024.0)
    s.opt.step()


@wrong("change-before-unscale")
def a_penalty_on_signs_before_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad = p.grad + 1e-3 * p.detach().sign()  # <-
    for gradient in gradients_of(s):
        gradient.mul_(1 / 1024)
    s.opt.step()


@wrong("gradients-kept")
def gradients_of_copies_never_set_to_zero(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    (nn.functional.cross_entropy(s.copies(x.half()).float(), y) * 1024).backward()  # <-
    masters = [*s.model.parameters()]
    for p, master in zip(s.copies.parameters(), masters, strict=True):
        master.grad = p.grad.float() / 1024
    s.opt.step()
    copy_back(s.copies, masters)


@wrong("gradients-kept")
def gradients_of_copies_pile_up_beside_bare_tensors(s: Loop, x: Any, y: Any) -> None:
    s.opt4.zero_grad()
    (nn.functional.cross_entropy(s.copies(x.half()).float(), y) * 256).backward()  # <-
    update_masters(s, 256)


@wrong("divided-by-another-factor")
def gradients_of_bare_tensors_divided_by_another_factor(s: Loop, x: Any, y: Any) -> None:
    s.copies.zero_grad()
    (nn.functional.cross_entropy(s.copies(x.half()).float(), y) * 256).backward()
    for p, master in zip(s.copies.parameters(), s.masters, strict=True):
        master.grad = p.grad.float() / 128  # <-
    s.opt4.step()
    copy_back(s.copies, s.masters)


@wrong("change-before-unscale")
def decay_added_and_divided_in_one_expression(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad = (p.grad + 5e-4 * p.detach()) / 1024  # <-
    s.opt.step()


@wrong("change-before-unscale")
def clamped_and_divided_in_one_expression(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad = p.grad.clamp(-0.1, 0.1) / 1024  # <-
    s.opt.step()


@wrong("change-before-unscale")
def decay_added_to_gradients_of_copies_before_the_division(s: Loop, x: Any, y: Any) -> None:
    copies, masters = run_copies(s, x, y)
    for p, master in zip(copies.parameters(), masters, strict=True):
        master.grad = (p.grad.float() + 5e-4 * master.detach()) / 1024  # <-
    s.opt.step()
    copy_back(copies, masters)


@wrong("loss-not-scaled")
def a_penalty_added_after_the_factor(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    penalty = sum(p.square().sum() for p in s.model.parameters())
    (s.loss(x, y) * 1024 + 0.01 * penalty).backward()  # <-
    for gradient in gradients_of(s):
        gradient.div_(1024)
    s.opt.step()


@wrong("loss-not-scaled")
def a_second_pass_without_the_factor(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    s.loss(x.flip(0), y.flip(0)).backward()  # <-
    torch._foreach_mul_(gradients_of(s), 1 / 1024)
    s.opt.step()


# Right steps.


@right
def decay_added_and_divided_after_the_division_in_one_expression(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad = p.grad / 1024 + 5e-4 * p.detach()
    s.opt.step()


@right
def a_penalty_times_the_factor(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    penalty = sum(p.square().sum() for p in s.model.parameters())
    (s.loss(x, y) * 1024 + 0.01 * 1024 * penalty).backward()
    for gradient in gradients_of(s):
        gradient.div_(1024)
    s.opt.step()


@right
def a_penalty_in_a_pass_after_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for gradient in gradients_of(s):
        gradient.div_(1024)
    (0.01 * sum(p.square().sum() for p in s.model.parameters())).backward()
    s.opt.step()


@right
def a_loss_of_two_models_with_a_factor_of_one(s: Loop, x: Any, y: Any) -> None:
    """The other model's gradients are neither multiplied nor divided."""
    s.opt.zero_grad()
    s.opt2.zero_grad()
    other = s.loss(x, y, s.other, torch.bfloat16)
    (s.loss(x, y, dtype=torch.bfloat16) * 1024 + other).backward()
    for gradient in gradients_of(s):
        gradient.div_(1024)
    s.opt.step()
    s.opt2.step()


@right
def decay_added_after_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad.div_(1024)
        p.grad.add_(p.detach(), alpha=5e-4)
    s.opt.step()


@right
def decay_times_the_factor_before_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for p in s.model.parameters():
        p.grad.add_(p.detach(), alpha=5e-4 * 1024)
        p.grad.div_(1024)
    s.opt.step()


@right
def the_factor_as_a_tensor(s: Loop, x: Any, y: Any) -> None:
    factor = torch.tensor(1024.0)
    s.opt.zero_grad()
    (factor * s.loss(x, y)).backward()
    torch._foreach_mul_(gradients_of(s), 1 / 1024)
    s.opt.step()


@right
def clipped_after_the_division(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    for gradient in gradients_of(s):
        gradient.div_(1024)
    clip_grad_norm_(s.model.parameters(), 0.01)
    s.opt.step()


@right
def clipped_to_a_limit_times_the_factor(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    clip_grad_norm_(s.model.parameters(), 0.1 * 1024)
    for gradient in gradients_of(s):
        gradient.div_(1024)
    s.opt.step()


@right
def passes_averaged_with_the_division(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(8), y.split(8), strict=True):
        (s.loss(part, target) * 1024).backward()
    for gradient in gradients_of(s):
        gradient.div_(4 * 1024)
    s.opt.step()


@right
def passes_averaged_in_the_loss(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    for part, target in zip(x.split(8), y.split(8), strict=True):
        (s.loss(part, target) / 4 * 1024).backward()
    for gradient in gradients_of(s):
        gradient.div_(1024)
    s.opt.step()


@right
def a_large_weight_of_a_loss_in_bf16(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y, 100.0, torch.bfloat16)
    clip_grad_norm_(s.model.parameters(), 1.0)
    s.opt.step()


@wrong("divided-by-another-factor")
def a_dynamic_scale_that_changes_before_the_division(s: Loop, x: Any, y: Any) -> None:
    scale = vars(s).setdefault("scale", [2.0**14])
    begin(s, x, y, scale[0])
    scale[0] /= 2
    for gradient in gradients_of(s):
        gradient.div_(scale[0])  # <-
    s.opt.step()


@right
def a_dynamic_scale_by_hand(s: Loop, x: Any, y: Any) -> None:
    scale = vars(s).setdefault("scale", [2.0**14])
    begin(s, x, y, scale[0])
    for gradient in gradients_of(s):
        gradient.div_(scale[0])
    if torch.isfinite(norm_of(s)):
        s.opt.step()
        scale[0] *= 2
    else:
        scale[0] /= 2


@right
def gradients_of_copies_divided_by_the_factor(s: Loop, x: Any, y: Any) -> None:
    copies, masters = run_copies(s, x, y)
    for p, master in zip(copies.parameters(), masters, strict=True):
        master.grad = p.grad.float()
        master.grad.mul_(1 / 1024)
    s.opt.step()
    copy_back(copies, masters)


@right
def bare_tensors_updated_by_gradients_of_the_copies(s: Loop, x: Any, y: Any) -> None:
    s.copies.zero_grad()
    (nn.functional.cross_entropy(s.copies(x.half()).float(), y) * 256).backward()
    update_masters(s, 256)


@right
def divided_inside_of_the_step_of_a_wrapper(s: Loop, x: Any, y: Any) -> None:
    begin(s, x, y)
    s.dividing.step()
