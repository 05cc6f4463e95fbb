"""Steps in forms that public training loops have: wrappers of optimizers, updates by hand, checkpoints, adapted clipping."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.features.rehearsal.stepping import Loop, right, wrong
from tests.features.rehearsal.steps_by_hand import gradients_of, norm_of


def limit_by_weights(s: Loop) -> None:
    """Adaptive clipping: the norm of a gradient is at most a share of the norm of its weights."""
    for p in s.model.parameters():
        assert p.grad is not None
        most = 0.01 * p.detach().norm().clamp(min=1e-3)
        p.grad.mul_((most / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


# Wrong steps; the finding is of the line with the mark "# <-".


@wrong("update-with-scaled-gradients")
def a_loss_scaled_twice(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.scaler.scale(s.scaler.scale(s.loss(x, y))).backward()
    s.scaler.step(s.opt)  # <-
    s.scaler.update()


@wrong("updated-twice")
def a_wrapped_optimizer_is_stepped_too(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.loss(x, y, dtype=torch.bfloat16).backward()
    s.lookahead.step()
    s.opt.step()  # <-


@wrong("update-not-skipped")
def a_manual_update_whose_check_comes_too_late(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    s.opt.step()  # <-
    if not torch.isfinite(norm_of(s)):
        s.opt.zero_grad()
    s.scaler.update()


@wrong("clip-before-unscale")
def clipped_in_the_last_of_several_calls(s: Loop, x: Any, y: Any) -> None:
    s.scaler.scale(s.loss(x, y) / 3).backward()
    s.calls += 1
    if s.calls % 3 == 0:
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)  # <-
        s.end()
        s.opt.zero_grad()


# Right steps.


@right
def a_wrapper_that_steps_another_optimizer(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.loss(x, y, dtype=torch.bfloat16).backward()
    s.lookahead.step()


@right
def a_wrapper_that_a_scaler_steps(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.step(s.lookahead)
    s.scaler.update()


@right
def an_update_by_hand_if_the_norm_is_finite(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    if torch.isfinite(norm):
        s.opt.step()
    s.scaler.update()


@right
def an_update_in_the_third_call(s: Loop, x: Any, y: Any) -> None:
    s.scaler.scale(s.loss(x, y) / 3).backward()
    s.calls += 1
    if s.calls % 3 == 0:
        s.scaler.unscale_(s.opt)
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.end()
        s.opt.zero_grad()


@right
def signs_of_averages(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.step(s.signs)
    s.scaler.update()


@right
def gradients_taken_and_assigned_with_their_scale(s: Loop, x: Any, y: Any) -> None:
    parameters = [*s.model.parameters()]
    gradients = torch.autograd.grad(s.scaler.scale(s.loss(x, y)), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    s.end()


@right
def adaptive_clipping_after_unscale(s: Loop, x: Any, y: Any) -> None:
    s.begin(x, y)
    s.scaler.unscale_(s.opt)
    limit_by_weights(s)
    s.end()


@right
def checkpoints_and_an_island(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = checkpoint(s.model[:2], x.requires_grad_(), use_reentrant=True)
        out = checkpoint(s.model[2], hidden, use_reentrant=False)
        with torch.autocast("cuda", enabled=False):
            loss = F.cross_entropy(out.float(), y, label_smoothing=0.1)
    s.scaler.scale(loss).backward()
    s.end()


@right
def two_losses_of_one_graph(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = s.model(x)
        first, second = F.cross_entropy(out, y), out.float().square().mean()
    s.scaler.scale(first).backward(retain_graph=True)
    s.scaler.scale(second).backward()
    s.end()


@right
def sharpness_by_hand_in_bf16(s: Loop, x: Any, y: Any) -> None:
    s.opt.zero_grad()
    s.loss(x, y, dtype=torch.bfloat16).backward()
    moves = [0.05 * gradient / (norm_of(s) + 1e-12) for gradient in gradients_of(s)]
    with torch.no_grad():
        torch._foreach_add_([*s.model.parameters()], moves)
    s.opt.zero_grad()
    s.loss(x, y, dtype=torch.bfloat16).backward()
    with torch.no_grad():
        torch._foreach_sub_([*s.model.parameters()], moves)
    s.opt.step()


@right
def representations_whose_scaled_gradients_are_kept(s: Loop, x: Any, y: Any) -> None:
    """Gradient caching: the scaled gradients of all outputs are the weights of a loss of each part."""
    s.opt.zero_grad()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        outputs = s.model(x).float()
    outputs.requires_grad_()
    s.scaler.scale(F.cross_entropy(outputs, y)).backward()
    assert outputs.grad is not None
    for part, kept in zip(x.split(8), outputs.grad.split(8), strict=True):
        with torch.autocast("cuda", dtype=torch.float16):
            out = s.model(part).float()
        (out * kept).sum().backward()
    s.end()
