"""Normalisations: by hand with and without an upcast, native, with statistics beyond FP16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.case import Case, on, raised, ramp


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class RmsNormUpcast(RmsNorm):
    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class RmsNormUpcastByCaller(RmsNorm):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


def rms_by_division(x: Tensor) -> Tensor:
    return x * (1 / torch.sqrt((x * x).mean(-1, keepdim=True)))


def mean_of_squares(x: Tensor) -> Tensor:
    return x + torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # a statistic, but no normalisation


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def layer_norm_centred_twice(x: Tensor) -> Tensor:
    u = x.mean(1, keepdim=True)
    variance = (x - u).pow(2).mean(1, keepdim=True)
    return (x - u) / torch.sqrt(variance + 1e-5)


def standardise(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


def standardise_with_rsqrt(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)


def variance_feature(x: Tensor) -> Tensor:
    return x + torch.sqrt(x.var(-1, keepdim=True))


def batch_norm(variance: float) -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.running_var.fill_(variance)
    return norm


NATIVE = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8))
BY_HAND = ("NRM001", "NRM002", "NRM003", "NRM006")

CASES = (
    Case("rms norm by hand", RmsNorm, (ramp(2, 8),), {"NRM001": {"pow_1"}}, ("NRM002", "NRM003", "NRM004")),
    Case("rms norm by division", *on(rms_by_division, ramp(2, 8)), {"NRM001": {"mul"}}, ("NRM003",)),
    # 300 ** 2 = 90000 > 65504; the norm is named for what it is, not for its square alone
    Case("rms norm, large", RmsNorm, (ramp(2, 8, scale=300),), {"NRM001": {"pow_1"}}, ("NRM003",)),
    Case("a mean of squares, large", *on(mean_of_squares, ramp(2, 8, scale=300)), {"NRM003": {"pow_1"}}, ("NRM001",)),
    Case(
        "energy, large",
        *on(lambda x: x.square().sum(-1).log(), ramp(2, 8, scale=300)),
        {"NRM003": {"square"}},
        ("NRM001", "RED006"),
    ),
    Case("rms norm, upcast", RmsNormUpcast, (ramp(2, 8, scale=300),), {}, BY_HAND),
    Case("rms norm, upcast by its caller", RmsNormUpcastByCaller, (ramp(2, 8, scale=300),), {}, BY_HAND),
    Case("a mean of squares", *on(mean_of_squares, ramp(2, 8)), {}, BY_HAND),
    Case("layer norm by hand", *on(layer_norm, ramp(2, 8)), {"NRM002": {"pow_1"}}, ("NRM001", "NRM006")),
    Case(
        "layer norm over channels, large",
        *on(layer_norm_centred_twice, ramp(2, 8, 3, scale=1000)),
        {"NRM002": {"pow_1"}},
        ("NRM001", "NRM003"),
    ),
    Case("layer norm, upcast", *on(raised(layer_norm), ramp(2, 8, scale=1000)), {}, BY_HAND),
    Case("native norms", lambda: NATIVE, (ramp(2, 8),), {"NRM004": {"layer_norm", "rms_norm"}}, ("NRM001", "NRM005")),
    Case("group norm", lambda: nn.GroupNorm(2, 8), (ramp(2, 8, 4),), {"NRM004": {"group_norm"}}),
    Case("norm of a float32 copy", *on(lambda x: F.layer_norm(x.float(), (8,)), ramp(2, 8)), {}, ("NRM004",)),
    Case("no norm", lambda: nn.Linear(8, 8), (ramp(2, 8),), {}, ("NRM004", "NRM005")),
    Case("variance beyond FP16", lambda: batch_norm(65520.0), (ramp(2, 8),), {"NRM005": {"batch_norm"}}),
    Case("variance far beyond FP16", lambda: batch_norm(1000000.0), (ramp(2, 8, 4),), {"NRM005": {"batch_norm"}}),
    Case("largest variance", lambda: batch_norm(65504.0), (ramp(2, 8),), {}, ("NRM005",)),
    Case("standardised by hand", *on(standardise, ramp(2, 8)), {"NRM006": {"var"}}, ("NRM002",)),
    Case("standardised with rsqrt", *on(standardise_with_rsqrt, ramp(2, 8)), {"NRM006": {"var"}}),
    Case("standardised, upcast", *on(raised(standardise), ramp(2, 8)), {}, BY_HAND),
    Case("variance as a feature", *on(variance_feature, ramp(2, 8)), {}, BY_HAND),
)
