"""Dense prediction: a gradient of a weight or bias is a sum over more positions than FP16's largest number, 65,504."""

import torch
from torch import Tensor, nn

from auditor.emulation.emulate import emulate
from auditor.features.training.measure import prepare
from auditor.features.training.objective import training_subject

SIZE, BATCH, STEPS = 96, 8, 3
"""Side of the square images, images per batch, and steps: 73,728 positions."""

SCALE = 65_536.0
"""GradScaler's initial loss scale."""


def dense_net() -> nn.Module:
    """A small net of transposed and depthwise convolutions, with a logit per position. Shapes: [n, 2, h, w] -> same."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, stride=2),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 2, 1),
    )


def batch() -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and a class per position."""
    drawn = torch.Generator().manual_seed(1)
    labels = torch.rand(BATCH, SIZE, SIZE, generator=drawn) < 0.1
    return torch.rand(BATCH, 2, SIZE, SIZE, generator=drawn), labels.long()


def test_no_backward_pass_of_a_dense_net_is_said_to_fail() -> None:
    x, labels = batch()
    subject = training_subject(dense_net(), (x, labels), {}, nn.CrossEntropyLoss())
    found = prepare(subject, ("fp16",), 0)
    assert {node.name: node.reasons for node in found.nodes if node.reasons} == {}


def test_a_training_loop_of_a_dense_net_skips_no_step() -> None:
    x, labels = batch()
    model = dense_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with emulate("cuda"):
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(x), labels)
            (loss * SCALE).backward()
        gradients = [parameter.grad / SCALE for parameter in model.parameters()]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
