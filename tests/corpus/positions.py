"""Integers, positions and coordinates beyond what a half format counts exactly: 2048 in FP16, 256 in BF16."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpus.case import BOTH, Case, Inside, coarse, flipped, largest_error, linear, normal, of, uniform
from tests.support.replaying import Model


def _overlap(boxes: Tensor) -> Tensor:
    """Width and height of the intersection of every two boxes."""
    top = torch.max(boxes[:, None, :2], boxes[None, :, :2])
    bottom = torch.min(boxes[:, None, 2:], boxes[None, :, 2:])
    return (bottom - top).clamp(min=0)


def offset_by_class(boxes: Tensor, labels: Tensor) -> Tensor:
    """Boxes of different classes are moved apart, so that one comparison serves all classes."""
    offset = labels.to(boxes.dtype) * (boxes.max() + 1.0)
    size = _overlap(boxes + offset[:, None])
    return size[..., 0] * size[..., 1] > 0.5


def masked_by_class(boxes: Tensor, labels: Tensor) -> Tensor:
    size = _overlap(boxes)
    return (size[..., 0] > 0.5) & (size[..., 1] > 0.5) & (labels[:, None] == labels[None])


def decoded(offset: Tensor, cell: Tensor, in_pixels: bool) -> Tensor:
    """From cell and offset to pixels, or to a share of the image."""
    cell = cell.to(offset.dtype)
    return (offset + cell + 0.5) * 8.0 if in_pixels else (offset + cell) * (1 / 128.0)


def relative_buckets(position: Tensor, raised: bool) -> Tensor:
    distance = position[:, None] - position[None]
    distance = distance.float() if raised else distance
    return (distance * 100.0).to(torch.long)


class Rotary(nn.Module):
    """phase: "low" (in the model's dtype), "buffer" (FP32 arithmetic on a buffer that a cast has reached), "fp32"."""

    def __init__(self, phase: str, width: int = 32) -> None:
        super().__init__()
        self.phase, self.width = phase, width
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width)))
        self.register_buffer("index", torch.arange(width // 2))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        angle = self._angle(x, position)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., : self.width // 2], x[..., self.width // 2 :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def _angle(self, x: Tensor, position: Tensor) -> Tensor:
        if self.phase == "low":
            return position.to(x.dtype)[:, None] * self.inv_freq
        if self.phase == "buffer":
            return position.float()[:, None] * self.inv_freq.float()
        return position.float()[:, None] * torch.exp(self.index.float() * (-2 * math.log(10000) / self.width))


def denoiser(raised: bool) -> nn.Module:
    def embedded(m: Any, step: Tensor, x: Tensor) -> Tensor:
        frequency = torch.exp(m.index.float() * (-math.log(10000) / 16))
        dtype = torch.float32 if raised else x.dtype
        angle = step.to(dtype)[:, None] * frequency.to(dtype)
        return torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)

    parts = {"time_embed": Model(embedded, index=torch.arange(16)), "mlp": linear(32, 16)}
    return Model(lambda m, x, step: x + m.mlp(m.time_embed(step, x)), **parts)


LABELS = torch.arange(24) % 3 + 36
STEPS = torch.tensor([999, 937, 833, 701, 595, 411, 307, 259])


def _boxes(origin: float) -> Tensor:
    """24 boxes of 3 by 3 pixels along a diagonal."""
    corner = torch.arange(24.0)[:, None].repeat(1, 2) * 2 + origin
    return coarse(torch.cat([corner, corner + 3], 1))


def _rotary(phase: str, offset: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Inside(rope=Rotary(phase)), (normal(64, 32), torch.arange(64) * 61 + offset)


CASES = (
    Case(
        name="nms_class_offset",
        formats=BOTH,
        citation="MultimediaTechLab/YOLO PR#234; pytorch/vision#3371; ultralytics/ultralytics PR#26114",
        mechanism="label * (largest coordinate + 1) leaves the exact integers: small boxes collapse",
        build=lambda: (of(offset_by_class), (_boxes(500), LABELS)),
        twin=lambda: (of(masked_by_class), (_boxes(0), LABELS)),
        culprits=(("add", ""), ("mul", "")),
        distance=flipped,
        tolerance=0.01,
    ),
    Case(
        name="yolo_grid_decode",
        formats=BOTH,
        citation="NVIDIA/TensorRT#1758; pytorch/vision#3371; MultimediaTechLab/YOLO PR#234",
        mechanism="pixels beyond 1024 are 1 apart in FP16, 8 in BF16",
        build=lambda: (Inside(decode=of(decoded, in_pixels=True)), (uniform(256), torch.arange(256) + 100)),
        twin=lambda: (Inside(decode=of(decoded, in_pixels=False)), (uniform(64), torch.arange(64))),
        culprits=(("mul", "decode"), ("add", "decode")),
        distance=largest_error,
        tolerance=0.5,
    ),
    Case(
        name="udop_bucket_index",
        formats=BOTH,
        citation="huggingface/transformers modeling_udop.py, where the author raises it by hand",
        mechanism="a difference times 100, truncated: rounding picks the neighboring bucket",
        build=lambda: (of(relative_buckets, raised=False), (uniform(32),)),
        twin=lambda: (of(relative_buckets, raised=True), (torch.arange(32) / 32.0,)),
        culprits=(("mul", ""), ("sub", ""), ("to", "")),
        distance=flipped,
        tolerance=0.005,
    ),
    Case(
        name="rope_phase_lowp",
        formats=BOTH,
        citation="huggingface/transformers PR#29285; EleutherAI/gpt-neox#1003; huggingface/candle PR#3520",
        mechanism="the angle is rounded to multiples of more than a turn; cosine and sine are noise",
        build=lambda: _rotary("low"),
        twin=lambda: _rotary("fp32"),
        culprits=(("mul", "rope"),),
        evidence="static",
    ),
    Case(
        name="rope_inv_freq_buffer_cast",
        formats=("bf16",),
        citation="sgl-project/sglang-jax#1472; nkalyanv99/UNI-D2 PR#6",
        mechanism="the frequencies keep 8 bits; raising them brings nothing back, and the error grows with the position",
        build=lambda: _rotary("buffer"),
        twin=lambda: _rotary("fp32"),
        culprits=(("mul", "rope"), ("to", "rope")),
        evidence="static",
    ),
    Case(
        name="rope_position_offset_65536",
        formats=BOTH,
        citation="huggingface/diffusers PR#13922",
        mechanism="512 neighboring positions are one in BF16; 65536 is infinite in FP16",
        build=lambda: _rotary("low", offset=65536),
        twin=lambda: _rotary("fp32", offset=65536),
        culprits=(("to", "rope"), ("mul", "rope")),
    ),
    Case(
        name="timestep_embedding_bf16",
        formats=("bf16",),
        citation="modelscope/DiffSynth-Studio PR#1025, #562; kohya-ss/musubi-tuner PR#729; apache/tvm PR#15811",
        mechanism="step 937 becomes 936, and the sine of the first frequency turns by a radian",
        build=lambda: (denoiser(raised=False), (normal(8, 16), STEPS)),
        twin=lambda: (denoiser(raised=True), (normal(8, 16), STEPS)),
        culprits=(("to", "time_embed"), ("mul", "time_embed")),
        evidence="static",
    ),
)
