"""Squares, variances and exponentials that leave FP16's range; several answer with zeros instead of infinities."""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.case import Case, Inside, coarse, conv3x3, linear, normal, of
from tests.support.replaying import Model


class ChannelNorm(nn.Module):
    """Layer norm over the channels, by hand or by the fused operation."""

    def __init__(self, channels: int, fused: bool) -> None:
        super().__init__()
        self.channels, self.fused = channels, fused
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            last = x.permute(0, 2, 3, 1)
            return F.layer_norm(last, (self.channels,), self.weight, self.bias, 1e-6).permute(0, 3, 1, 2)
        centred = x - x.mean(1, keepdim=True)
        variance = centred.pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * (centred / torch.sqrt(variance + 1e-6)) + self.bias[:, None, None]


def conv_then_norm(fused: bool) -> nn.Module:
    return nn.Sequential(OrderedDict(conv=conv3x3(8, 16, 40.0), norm=ChannelNorm(16, fused)))


def standardised(x: Tensor, by_deviation: bool) -> Tensor:
    """By the variance, or by the standard deviation, whose result stays in range."""
    centred = x - x.mean(-1, keepdim=True)
    if by_deviation:
        return centred / x.std(-1, keepdim=True)
    return centred / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


def weighted(key: Tensor, value: Tensor, shifted: bool) -> Tensor:
    """A softmax over time, written out; `shifted` subtracts the maximum first."""
    if shifted:
        key = key - key.amax(1, keepdim=True)
    weights = torch.exp(key)
    return (weights * value).sum(1) / weights.sum(1)


def batched(variance: float) -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.running_var.fill_(variance)
    return Inside(bn=norm).eval()


def share_of_density(m: Any, x: Tensor) -> Tensor:
    density = m.density(x)
    return density / (density + density.mean())


def radiance_field(bias: float) -> nn.Module:
    return Model(share_of_density, density=Model(lambda m, x: torch.exp(m.fc(x) + bias), fc=linear(32, 8)))


def decay(log_decay: float) -> nn.Module:
    """The decay of a gated delta net: -exp(A_log) * softplus."""
    parameters = {"A_log": nn.Parameter(torch.full((4,), log_decay)), "dt_bias": nn.Parameter(torch.zeros(4))}
    return Model(lambda m, x: torch.exp(-m.A_log.exp() * F.softplus(x + m.dt_bias)), **parameters)


def _times(low: float, high: float) -> Tensor:
    return coarse(torch.linspace(low, high, 16)[:, None].repeat(1, 4))


CASES = (
    Case(
        name="layernorm2d_pow_overflow",
        formats=("fp16",),
        citation="neuroneural/brainchop-cli PR#56; ml-explore/mlx#4228; pytorch/pytorch#66707",
        mechanism="the square of 1000 is infinite, and dividing by infinity leaves an image of zeros",
        build=lambda: (conv_then_norm(fused=False), (normal(1, 8, 12, 12, scale=4),)),
        twin=lambda: (conv_then_norm(fused=True), (normal(1, 8, 12, 12, scale=4),)),
        culprits=(("pow", "norm"),),
    ),
    Case(
        name="native_var_overflow",
        formats=("fp16",),
        citation="ml-explore/mlx#4228; pytorch/executorch PR#16727",
        mechanism="the variance is reduced in FP32 but stored as FP16, where 400 squared is infinite: silent zeros",
        build=lambda: (Inside(norm=of(standardised, by_deviation=False)), (normal(4, 256, scale=400),)),
        twin=lambda: (Inside(norm=of(standardised, by_deviation=True)), (normal(4, 256, scale=400),)),
        culprits=(("var", "norm"),),
    ),
    Case(
        name="bn_running_var_inf",
        formats=("fp16",),
        citation="apple/coreai-torch PR#54; pytorch/pytorch PR#126525; fastai/fastai#507",
        mechanism="a running variance over 65504 is stored as infinity: silent zeros",
        build=lambda: (batched(1e6), (normal(2, 4, 4, 4, scale=1000),)),
        twin=lambda: (batched(4.0), (normal(2, 4, 4, 4),)),
        culprits=(("batch_norm", "bn"), ("_native_batch_norm_legit_no_training", "bn")),
        evidence="param",
    ),
    Case(
        name="ngp_density_exp",
        formats=("fp16",),
        citation="ashawkey/torch-ngp, activation.py: custom_fwd(cast_inputs=torch.float32)",
        mechanism="exp(x) passes 65504 at x = 11.09",
        build=lambda: (radiance_field(11.0), (normal(16, 32),)),
        twin=lambda: (radiance_field(0.0), (normal(16, 32),)),
        culprits=(("exp", "density"),),
    ),
    Case(
        name="rwkv_wkv_exp",
        formats=("fp16",),
        citation="huggingface/transformers modeling_rwkv.py (states in FP32); facebookresearch/xformers PR#98",
        mechanism="exp(k) without a shift by the maximum",
        build=lambda: (Inside(att=of(weighted, shifted=False)), (normal(2, 32, 8, scale=5), normal(2, 32, 8, seed=1))),
        twin=lambda: (Inside(att=of(weighted, shifted=True)), (normal(2, 32, 8, scale=5), normal(2, 32, 8, seed=1))),
        culprits=(("exp", "att"),),
    ),
    Case(
        name="a_log_exp_inf",
        formats=("fp16",),
        citation="huggingface/transformers modeling_qwen3_next.py (A_log raised by hand); state-spaces/mamba PR#923",
        mechanism="exp(12) is infinite while softplus underflows to zero: infinity times zero",
        build=lambda: (Inside(mixer=decay(12.0)), (_times(-20, 0),)),
        twin=lambda: (Inside(mixer=decay(1.0)), (_times(-4, 4),)),
        culprits=(("exp", "mixer"),),
        evidence="param",
    ),
)
