"""A recorded step as it never ran: one operation low, or everything, with gradients worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.replay.lowered_step import one_low, spoilt
from tests.stepping import Scaled, stepped

U = 2.0**-7


def test_one_operation_low_forwards_and_backwards() -> None:
    # w gets 1.5 (1 + U), which BF16 takes from 1.5 + 1.5 U to 1.5 + 2 U; the loss, 1.5 (1 + U), is formed in FP32
    step = stepped(Scaled(), torch.tensor([1 + U]), torch.tensor([1.5]))
    names = [name for name, node in step.capture.nodes.items() if node.op == "aten.mul.Tensor"]
    low = one_low(step, names[0], "bf16")
    assert (low.loss, low.gradients["w"].item()) == (1.5 + 1.5 * U, 1.5 + 2 * U)
    # the loss's own product rounds forwards, and hands 1.5 back as it is
    low = one_low(step, names[1], "bf16")
    assert (low.loss, low.gradients["w"].item()) == (1.5 + 2 * U, 1.5 + 1.5 * U)
    assert step.by_parameter["w"].item() == 1.5 + 1.5 * U


def test_one_that_cannot_run_is_a_failure() -> None:
    model = Scaled(1.0, lambda y: torch.linalg.cholesky(y * torch.eye(2)))
    low = one_low(stepped(model, torch.tensor([4.0]), torch.tensor([1.0])), "linalg_cholesky", "fp16")
    assert low.failure is not None
    assert "kernel on CUDA" in low.failure


def test_the_operation_that_breaks_a_finite_gradient_is_named() -> None:
    # 1e-8 is zero in FP16, whose root is 0 and finite; the root's derivative there is not
    step = stepped(Scaled(1.0, Tensor.sqrt), torch.tensor([1e-8]), torch.tensor([1.0]))
    assert spoilt(step, "fp16") == {"sqrt": "w"}
    assert spoilt(step, "bf16") == {}


def test_where_the_loss_itself_is_not_finite_none_is_named() -> None:
    step = stepped(Scaled(12.0, Tensor.exp), torch.tensor([1.0]), torch.tensor([1.0]))
    assert spoilt(step, "fp16") == {}
