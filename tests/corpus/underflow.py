"""Guards against division by zero that are zero themselves in FP16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.case import Case, Inside, coarse, normal, not_finite


class LinearAttention(nn.Module):
    """Keys and values are summed first; a column of ones gives the denominator."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        summed = F.relu(k).transpose(-1, -2) @ F.pad(v, (0, 1), value=1.0)
        mixed = F.relu(q) @ summed
        return mixed[..., :-1] / (mixed[..., -1:] + self.eps)


class Normalise(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.eps)


class Similarity(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(a, b, dim=-1, eps=self.eps)


class DepthFromDisparity(nn.Module):
    def forward(self, disparity: Tensor) -> Tensor:
        return 50.0 / (disparity + 1e-8)


class AdamStep(nn.Module):
    """The first step of Adam, its moments in the dtype of the gradient."""

    def forward(self, gradient: Tensor) -> Tensor:
        return (0.1 * gradient) / ((0.001 * gradient * gradient).sqrt() + 1e-8)


def _queries_below_zero() -> tuple[Tensor, Tensor, Tensor]:
    q, k = normal(1, 4096, 16, scale=0.25), normal(1, 4096, 16, scale=0.25, seed=1)
    return -q.abs(), k, normal(1, 4096, 16, seed=2) + 0.5


def _a_zero_row() -> Tensor:
    return torch.cat([normal(3, 16), torch.zeros(1, 16)])


CASES = (
    Case(
        name="eps_1e15_division",
        formats=("fp16",),
        citation="mit-han-lab/efficientvit#15; pyg-team/pytorch_geometric PR#2106",
        mechanism="1e-15 rounds to zero; a query without a positive feature divides zero by zero",
        build=lambda: (Inside(attn=LinearAttention(1e-15)), _queries_below_zero()),
        twin=lambda: (Inside(attn=LinearAttention(1e-4)), _queries_below_zero()),
        culprits=(("add", "attn"), ("div", "attn")),
        evidence="static",
        distance=not_finite,
        tolerance=0.0,
    ),
    Case(
        name="f_normalize_eps",
        formats=("fp16",),
        citation="pytorch/pytorch#32137, PR#33596; kornia/kornia#4021",
        mechanism="clamp_min(1e-12) clamps at zero: zero by zero",
        build=lambda: (Normalise(1e-12), (_a_zero_row(),)),
        twin=lambda: (Normalise(1e-4), (_a_zero_row(),)),
        culprits=(("clamp_min", ""), ("div", "")),  # what F.normalize is made of
        evidence="static",
    ),
    Case(
        name="cosine_similarity_eps",
        formats=("fp16",),
        citation="pytorch/pytorch#32137, #151110",
        mechanism="its eps of 1e-8 rounds to zero",
        build=lambda: (Similarity(1e-8), (_a_zero_row(), normal(4, 16, seed=1))),
        twin=lambda: (Similarity(1e-4), (_a_zero_row(), normal(4, 16, seed=1))),
        culprits=(("cosine_similarity", ""),),
        evidence="static",
    ),
    Case(
        name="depth_from_disparity_eps",
        formats=("fp16",),
        citation="kornia/kornia#4272, PR#4317",
        mechanism="a disparity of zero plus 1e-8 is zero: the depth is infinite",
        build=lambda: (DepthFromDisparity(), (torch.tensor([0.0, 1.0, 4.0]),)),
        twin=lambda: (DepthFromDisparity(), (torch.tensor([0.5, 1.0, 4.0]),)),
        culprits=(("add", ""), ("reciprocal", ""), ("div", "")),
    ),
    Case(
        name="adam_eps_fp16",
        formats=("fp16",),
        citation="chainer/chainer#6299, PR#6442; google-deepmind/optax#1754; afiaka87/glide-finetune PR#6",
        mechanism="the second moment and eps both become zero",
        build=lambda: (AdamStep(), (coarse(torch.tensor([0.0, 1e-3, 1e-2, 1.0])),)),
        twin=lambda: (AdamStep(), (torch.tensor([1.0, 2.0, 8.0, 16.0]),)),
        culprits=(("add", ""), ("div", ""), ("mul", "")),
        evidence="static",
    ),
)
