"""Guards against division by zero that are zero themselves in FP16."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.case import Case, Inside, coarse, normal, not_finite, of


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float) -> Tensor:
    """Keys and values are summed first; a column of ones gives the denominator."""
    mixed = F.relu(q) @ (F.relu(k).transpose(-1, -2) @ F.pad(v, (0, 1), value=1.0))
    return mixed[..., :-1] / (mixed[..., -1:] + eps)


def depth(disparity: Tensor) -> Tensor:
    return 50.0 / (disparity + 1e-8)


def adam_step(gradient: Tensor) -> Tensor:
    """The first step of Adam, its moments in the dtype of the gradient."""
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
        build=lambda: (Inside(attn=of(linear_attention, eps=1e-15)), _queries_below_zero()),
        twin=lambda: (Inside(attn=of(linear_attention, eps=1e-4)), _queries_below_zero()),
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
        build=lambda: (of(F.normalize, dim=-1, eps=1e-12), (_a_zero_row(),)),
        twin=lambda: (of(F.normalize, dim=-1, eps=1e-4), (_a_zero_row(),)),
        culprits=(("clamp_min", ""), ("div", "")),  # what F.normalize is made of
        evidence="static",
    ),
    Case(
        name="cosine_similarity_eps",
        formats=("fp16",),
        citation="pytorch/pytorch#32137, #151110",
        mechanism="its eps of 1e-8 rounds to zero",
        build=lambda: (of(F.cosine_similarity, dim=-1, eps=1e-8), (_a_zero_row(), normal(4, 16, seed=1))),
        twin=lambda: (of(F.cosine_similarity, dim=-1, eps=1e-4), (_a_zero_row(), normal(4, 16, seed=1))),
        culprits=(("cosine_similarity", ""),),
        evidence="static",
    ),
    Case(
        name="depth_from_disparity_eps",
        formats=("fp16",),
        citation="kornia/kornia#4272, PR#4317",
        mechanism="a disparity of zero plus 1e-8 is zero: the depth is infinite",
        build=lambda: (of(depth), (torch.tensor([0.0, 1.0, 4.0]),)),
        twin=lambda: (of(depth), (torch.tensor([0.5, 1.0, 4.0]),)),
        culprits=(("add", ""), ("reciprocal", ""), ("div", "")),
    ),
    Case(
        name="adam_eps_fp16",
        formats=("fp16",),
        citation="chainer/chainer#6299, PR#6442; google-deepmind/optax#1754; afiaka87/glide-finetune PR#6",
        mechanism="the second moment and eps both become zero",
        build=lambda: (of(adam_step), (coarse(torch.tensor([0.0, 1e-3, 1e-2, 1.0])),)),
        twin=lambda: (of(adam_step), (torch.tensor([1.0, 2.0, 8.0, 16.0]),)),
        culprits=(("add", ""), ("div", ""), ("mul", "")),
        evidence="static",
    ),
)
