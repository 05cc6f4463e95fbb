"""Differences of nearly equal numbers, where all that is left is what rounding did to them."""

import torch
from torch import Tensor, nn

from tests.corpus.case import BOTH, Case, Inside, coarse, flipped, normal, of


class NearestCode(nn.Module):
    """Squared distances to a codebook, expanded into products or taken directly."""

    def __init__(self, expanded: bool) -> None:
        super().__init__()
        self.expanded = expanded
        self.codebook = nn.Parameter(coarse(normal(64, 32, seed=3) * 0.25 + 8.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.expanded:
            squares = (x * x).sum(-1, keepdim=True) + (self.codebook * self.codebook).sum(-1)[None]
            return (squares - 2 * x @ self.codebook.t()).argmin(-1)
        return (x[:, None] - self.codebook[None]).pow(2).sum(-1).argmin(-1)


def standardised(x: Tensor, one_pass: bool) -> Tensor:
    """By E[x^2] - E[x]^2 in one pass, or by E[(x - E[x])^2] in two."""
    mean = x.mean(-1, keepdim=True)
    squares = x * x if one_pass else (x - mean).pow(2)
    variance = squares.mean(-1, keepdim=True)
    variance = variance - mean * mean if one_pass else variance
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def focal_loss(logits: Tensor, target: Tensor, eps: float) -> Tensor:
    p = torch.sigmoid(logits).clamp(eps, 1.0 - eps)
    return -(target * (1 - p) ** 2 * torch.log(p) + (1 - target) * p**2 * torch.log(1 - p)).mean()


def gaussian_log_probability(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    scale = log_scale.exp()
    return (-((x - mean) ** 2) / (2 * scale * scale) - log_scale).sum(-1)


def _logits() -> tuple[Tensor, Tensor]:
    return torch.tensor([12.0, -3.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])


def _codes() -> Tensor:
    return coarse(normal(64, 32) * 0.25 + 8.0)


def _narrow() -> tuple[Tensor, Tensor, Tensor]:
    """Samples 0.001 from the mean, at a scale of exp(-8) = 0.0003."""
    mean = torch.full((4, 4), 2.0)
    return mean + 0.001 * normal(4, 4), mean, torch.full((4, 4), -8.0)


def _wide() -> tuple[Tensor, Tensor, Tensor]:
    return normal(4, 4), normal(4, 4, seed=1), torch.full((4, 4), -0.5)


CASES = (
    Case(
        name="var_ex2_minus_ex_sq",
        formats=BOTH,
        citation="pytorch/executorch PR#16727",
        mechanism="two rounded numbers near 1600 differ by 0.25; the variance may come out negative",
        build=lambda: (Inside(norm=of(standardised, one_pass=True)), (coarse(normal(8, 64) * 0.5 + 40),)),
        twin=lambda: (Inside(norm=of(standardised, one_pass=False)), (normal(8, 64),)),
        culprits=(("sub", "norm"),),
        tolerance=0.06,
    ),
    Case(
        name="expanded_pairwise_distance",
        formats=BOTH,
        citation="NVIDIA/cuvs#991; pytorch/pytorch#136748, #42479, #57690",
        mechanism="|a|^2 + |b|^2 - 2ab leaves less than a last place of |a|^2: another code is nearest",
        build=lambda: (NearestCode(expanded=True), (_codes(),)),
        twin=lambda: (NearestCode(expanded=False), (_codes(),)),
        culprits=(("sub", ""),),
        distance=flipped,
    ),
    Case(
        name="focal_clamp_1m1e4",
        formats=BOTH,
        citation="zylo117/Yet-Another-EfficientDet-Pytorch#502; xingyizhou/CenterNet#234; keras-team/keras-core#196",
        mechanism="1 - 1e-4 rounds to 1, and the logarithm of 1 - p is -inf",
        build=lambda: (of(focal_loss, eps=1e-4), _logits()),
        twin=lambda: (of(focal_loss, eps=2**-6), _logits()),
        culprits=(("clamp", ""), ("log", "")),
        evidence="static",
    ),
    Case(
        name="normal_logprob_small_sigma",
        formats=BOTH,
        citation="HorizonRobotics/alf PR#1651",
        mechanism="the squared scale and the squared distance are both tiny; their ratio is rounding",
        build=lambda: (of(gaussian_log_probability), _narrow()),
        twin=lambda: (of(gaussian_log_probability), _wide()),
        culprits=(("sub", ""), ("div", ""), ("mul", "")),
    ),
)
