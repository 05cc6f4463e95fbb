"""Products, scores and masks that leave FP16's range, though what enters and what is wanted would fit."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.case import Case, Inside, conv3x3, linear, normal, of, uniform
from tests.support.replaying import Model


def gated_feed_forward(gain: float) -> nn.Module:
    """As T5 writes it, with its names."""
    layers = {"wi_0": linear(64, 512, gain), "wi_1": linear(64, 512, gain, seed=1), "wo": linear(512, 64, 20.0, seed=2)}
    return Model(lambda m, x: m.wo(F.gelu(m.wi_0(x)) * m.wi_1(x)), **layers)


def gated_linear_unit(gain: float) -> nn.Module:
    layers = {"gate": linear(64, 128, gain), "up": linear(64, 128, gain, seed=1), "down": linear(128, 64, 0.01, seed=2)}
    return Model(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **layers)


def scaled_late(m: Any, x: Tensor) -> Tensor:
    """Attention that scales the scores after the product, when it is too late."""
    scores = torch.einsum("bid,bjd->bij", m.q(x), m.k(x)) * 0.125
    return scores.softmax(-1) @ m.v(x)


def einsum_attention(gain: float) -> nn.Module:
    return Model(scaled_late, q=linear(64, 64, gain), k=linear(64, 64, gain, seed=1), v=linear(64, 64, seed=2))


def additive_mask(scores: Tensor, mask: Tensor, fill: float) -> Tensor:
    return (scores + (1.0 - mask.to(scores.dtype)) * fill).softmax(-1)


def rendered(density: Tensor, steps: Tensor, far: float) -> Tensor:
    """The last sample of a ray reaches to `far`."""
    return 1.0 - torch.exp(-F.relu(density) * F.pad(steps, (0, 1), value=far))


PADDED_ROW = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
NO_PADDED_ROW = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])


def upsampled(m: Any, x: Tensor) -> Tensor:
    x = F.interpolate(x, scale_factor=2.0, mode="nearest")
    return m.norm(m.conv2(F.silu(m.conv1(x))))


def upsampler(gain: float) -> nn.Module:
    layers = {"conv1": conv3x3(16, 32, gain), "conv2": conv3x3(32, 16, gain, seed=1), "norm": nn.GroupNorm(4, 16)}
    return Model(upsampled, **layers)


CASES = (
    Case(
        name="t5_ffn_wo",
        formats=("fp16",),
        citation="huggingface/transformers#5651, #9295; _keep_in_fp32_modules = ['wo'] in modeling_t5.py",
        mechanism="the gated hidden state fits, its projection by wo sums past 65504; the next norm makes it NaN",
        build=lambda: (gated_feed_forward(80.0), (normal(4, 64),)),
        twin=lambda: (gated_feed_forward(1.0), (normal(4, 64),)),
        culprits=(("linear", "wo"),),
    ),
    Case(
        name="glu_product",
        formats=("fp16",),
        citation="unslothai/unsloth-zoo PR#600; cactus-compute/cactus#503",
        mechanism="gate and up fit, their product does not",
        build=lambda: (Inside(mlp=gated_linear_unit(200.0)), (normal(8, 64),)),
        twin=lambda: (Inside(mlp=gated_linear_unit(1.0)), (normal(8, 64),)),
        culprits=(("mul", "mlp"),),
    ),
    Case(
        name="qk_einsum_overflow",
        formats=("fp16",),
        citation="Stability-AI/stablediffusion PR#89; AUTOMATIC1111/stable-diffusion-webui PR#6510; showlab/Tune-A-Video#103",
        mechanism="q k^T is infinite before the scale brings it back; the image is black",
        build=lambda: (Inside(attn=einsum_attention(150.0)), (normal(2, 16, 64),)),
        twin=lambda: (Inside(attn=einsum_attention(1.0)), (normal(2, 16, 64),)),
        culprits=(("einsum", "attn"),),
    ),
    Case(
        name="additive_mask_1e9",
        formats=("fp16",),
        citation="huggingface/transformers PR#18057, PR#17437, #17121",
        mechanism="-1e9 is -inf, and a fully padded row of -inf has no softmax; FP32 gives a uniform one",
        build=lambda: (Inside(attn=of(additive_mask, fill=-1e9)), (normal(3, 4), PADDED_ROW)),
        twin=lambda: (Inside(attn=of(additive_mask, fill=-1e4)), (normal(3, 4), NO_PADDED_ROW)),
        culprits=(("mul", "attn"),),
    ),
    Case(
        name="sdxl_vae_conv",
        formats=("fp16",),
        citation="huggingface/diffusers force_upcast; huggingface/candle#1060; apple/ml-stable-diffusion#304; "
        "leejet/stable-diffusion.cpp PR#888",
        mechanism="activations between the convolutions pass 65504",
        build=lambda: (Inside(up=upsampler(20.0)), (normal(1, 16, 8, 8, scale=20),)),
        twin=lambda: (Inside(up=upsampler(0.05)), (normal(1, 16, 8, 8),)),
        culprits=(("conv2d", "up.conv2"),),
    ),
    Case(
        name="nerf_far_delta_1e10",
        formats=("fp16",),
        citation="yenchenlin/nerf-pytorch, raw2outputs: a pattern in the source, no report found",
        mechanism="1e10 is infinite, and a density of zero times infinity is NaN",
        build=lambda: (of(rendered, far=1e10), (normal(4, 8), uniform(4, 7, low=0.01, high=0.1))),
        twin=lambda: (of(rendered, far=1e3), (normal(4, 8), uniform(4, 7, low=0.01, high=0.1))),
        culprits=(("mul", ""), ("pad", "")),
        evidence="static",
    ),
    Case(
        name="sum_over_n_pooling",
        formats=("fp16",),
        citation="PaddlePaddle/Paddle-Lite PR#9763; pytorch/pytorch#2391, #74438",
        mechanism="the sum over 4096 positions is stored before it is divided",
        build=lambda: (Inside(pool=of(lambda x: x.sum(1) / 4096.0)), (uniform(2, 4096, 8, low=20, high=60),)),
        twin=lambda: (Inside(pool=of(lambda x: x.mean(1))), (uniform(2, 4096, 8, low=20, high=60),)),
        culprits=(("sum", "pool"),),
    ),
)
