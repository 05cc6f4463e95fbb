"""Losses whose value is right in a half format and whose gradient is not."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.corpus.case import BOTH, Case
from tests.support.replaying import Model


def pair_loss(eps: float) -> nn.Module:
    """The clamp keeps p below 1 by `eps`, and a mask discards the pair it was meant for."""

    def loss(m: Any, wanted: Tensor) -> Tensor:
        logarithm = torch.log1p(-torch.sigmoid(m.logits).clamp(max=1.0 - eps))
        return torch.where(wanted > 0, logarithm, torch.zeros_like(logarithm)).sum()

    return Model(loss, logits=nn.Parameter(torch.tensor([20.0, 0.5, -1.0])))


def distance_loss(eps: float) -> nn.Module:
    points = nn.Parameter(torch.tensor([[1e-4, 1e-4], [1.0, 2.0]]))
    return Model(lambda m, x: ((m.points * x).pow(2).sum(-1) + eps).sqrt().sum(), points=points)


CASES = (
    Case(
        name="log1p_clamp_grad_nan",
        formats=BOTH,
        citation="fastino-ai/GLiNER2 PR#155",
        mechanism="1 - 1e-6 is 1: the mask hides the infinity forwards, and backwards zero times infinity is NaN",
        build=lambda: (pair_loss(1e-6), (torch.tensor([0.0, 1.0, 1.0]),)),
        twin=lambda: (pair_loss(2**-6), (torch.tensor([0.0, 1.0, 1.0]),)),
        culprits=(("log1p", ""), ("clamp", "")),
        evidence="grad",
        mode="train",
    ),
    Case(
        name="l2norm_grad_underflow",
        formats=("fp16",),
        citation="openvinotoolkit/openvino PR#8676; kornia/kornia#3966; pytorch/pytorch#33596",
        mechanism="square and eps are both zero: the slope of the root is infinite, times zero",
        build=lambda: (distance_loss(1e-12), (torch.ones(2),)),
        twin=lambda: (distance_loss(2**-8), (torch.ones(2),)),
        culprits=(("sqrt", ""), ("pow", ""), ("add", "")),
        evidence="grad",
        tolerance=0.1,
        mode="train",
    ),
)
