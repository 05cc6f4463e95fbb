"""Losses whose value is right in a half format and whose gradient is not."""

import torch
from torch import Tensor, nn

from tests.corpus.case import BOTH, Case


class PairLoss(nn.Module):
    """The clamp keeps p below 1 by `eps`, and a mask discards the pair it was meant for."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps, self.logits = eps, nn.Parameter(torch.tensor([20.0, 0.5, -1.0]))

    def forward(self, wanted: Tensor) -> Tensor:
        p = torch.sigmoid(self.logits).clamp(max=1.0 - self.eps)
        logarithm = torch.log1p(-p)
        return torch.where(wanted > 0, logarithm, torch.zeros_like(logarithm)).sum()


class DistanceLoss(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.points, self.eps = nn.Parameter(torch.tensor([[1e-4, 1e-4], [1.0, 2.0]])), eps

    def forward(self, x: Tensor) -> Tensor:
        return ((self.points * x).pow(2).sum(-1) + self.eps).sqrt().sum()


CASES = (
    Case(
        name="log1p_clamp_grad_nan",
        formats=BOTH,
        citation="fastino-ai/GLiNER2 PR#155",
        mechanism="1 - 1e-6 is 1: the mask hides the infinity forwards, and backwards zero times infinity is NaN",
        build=lambda: (PairLoss(1e-6), (torch.tensor([0.0, 1.0, 1.0]),)),
        twin=lambda: (PairLoss(2**-6), (torch.tensor([0.0, 1.0, 1.0]),)),
        culprits=(("log1p", ""), ("clamp", "")),
        evidence="grad",
        mode="train",
    ),
    Case(
        name="l2norm_grad_underflow",
        formats=("fp16",),
        citation="openvinotoolkit/openvino PR#8676; kornia/kornia#3966; pytorch/pytorch#33596",
        mechanism="square and eps are both zero: the slope of the root is infinite, times zero",
        build=lambda: (DistanceLoss(1e-12), (torch.ones(2),)),
        twin=lambda: (DistanceLoss(2**-8), (torch.ones(2),)),
        culprits=(("sqrt", ""), ("pow", ""), ("add", "")),
        evidence="grad",
        tolerance=0.1,
        mode="train",
    ),
)
