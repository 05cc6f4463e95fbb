"""Many small additions to a large number, each below its last place."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.corpus.case import BOTH, Case, Inside, linear, normal, of, uniform
from tests.support.replaying import Model


def residual_stream(bias: float, step: float) -> nn.Module:
    """What 24 blocks add to a stream that is `bias` away from zero."""

    def added(m: Any, x: Tensor) -> Tensor:
        h = x + bias
        return m.layers(h) - h

    blocks = [Model(lambda m, x: x + torch.tanh(m.f(x)) * step, f=linear(32, 32, 0.3, seed=i % 3)) for i in range(24)]
    return Model(added, layers=nn.Sequential(*blocks))


def moved(average: Tensor, weights: Tensor, decay: float) -> Tensor:
    """How far an exponential moving average of weights moves in twenty steps."""
    moved = average
    for _ in range(20):
        moved = moved * decay + weights * (1 - decay)
    return moved - average


def flow(coordinates: Tensor, update: Tensor, on_coordinates: bool) -> Tensor:
    """Twelve updates of a flow, summed on the coordinates or by themselves."""
    total = coordinates if on_coordinates else update
    for _ in range(12 if on_coordinates else 11):
        total = total + update
    return total - coordinates if on_coordinates else total


def _coordinates() -> tuple[Tensor, Tensor]:
    return torch.arange(512.0, 1024.0, 8), uniform(64, low=0.05, high=0.2)


CASES = (
    Case(
        name="ema_bf16_lost_update",
        formats=BOTH,
        citation="d8ahazard/sd_dreambooth_extension PR#1417; PaddlePaddle/PaddleMIX PR#515",
        mechanism="(1 - decay) * (weight - average) is below half a last place: the average stands still",
        build=lambda: (of(moved, decay=0.999), (uniform(64, low=1, high=2), uniform(64, low=1, high=2, seed=1) + 0.5)),
        twin=lambda: (of(moved, decay=0.5), (uniform(64, low=1, high=2), uniform(64, low=4, high=8, seed=1))),
        culprits=(("add", ""), ("mul", "")),
        tolerance=0.15,
    ),
    Case(
        name="residual_stream_bf16",
        formats=("bf16",),
        citation="huggingface/transformers modeling_zaya.py; state-spaces/mamba residual_in_fp32",
        mechanism="what each block adds is below a last place of the stream",
        build=lambda: (residual_stream(4.0, 2.0**-7), (normal(8, 32, scale=0.1),)),
        twin=lambda: (residual_stream(0.0, 0.5), (normal(8, 32),)),
        culprits=(("add", "layers"),),
        tolerance=0.15,
    ),
    Case(
        name="raft_coords_accumulate",
        formats=BOTH,
        citation="princeton-vl/RAFT#54; princeton-vl/RAFT-Stereo#66",
        mechanism="coordinates near 700 are 0.5 apart in FP16, 4 in BF16: each sub-pixel update is lost",
        build=lambda: (Inside(refine=of(flow, on_coordinates=True)), _coordinates()),
        twin=lambda: (Inside(refine=of(flow, on_coordinates=False)), _coordinates()),
        culprits=(("add", "refine"),),
    ),
)
