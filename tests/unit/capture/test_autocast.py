"""Autocast inside an emulated run is CUDA's, also beside the lists that numerics/test_lists.py goes through."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from tests.support.subjects import normal

FP16, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32


def test_refused() -> None:
    x = torch.full((2,), 0.5)
    with auditor.emulate(), torch.autocast("cuda"), pytest.raises(RuntimeError, match="cannot run under autocast"):
        nn.functional.binary_cross_entropy(x, x)
    with auditor.emulate():
        assert nn.functional.binary_cross_entropy(x, x).dtype is WIDE


def test_a_default_that_was_set_counts() -> None:
    torch.set_autocast_dtype("cuda", BF16)
    try:
        with auditor.emulate(), torch.autocast("cpu"):
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is BF16
    finally:
        torch.set_autocast_dtype("cuda", FP16)


@pytest.mark.parametrize("region", [FP16, BF16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_fp16_in_a_bf16_region_too(kind: type[nn.RNNBase], region: torch.dtype) -> None:
    layer, x = kind(4, 4, num_layers=2, bidirectional=True), normal(3, 2, 4)  # cuDNN's autocast wrapper hard-codes it
    with auditor.emulate(), torch.autocast("cuda", dtype=region):
        found = layer(x)[0]
    with auditor.emulate(), torch.autocast("cuda", dtype=FP16):
        assert torch.equal(layer(x)[0], found)
    assert found.dtype is FP16
    with auditor.emulate():  # stored in BF16 it is BF16
        assert layer.bfloat16()(x.bfloat16())[0].dtype is BF16


class Scaled(torch.autograd.Function):
    """Asks for FP32, as code that goes with CUDA kernels of its own does."""

    seen: list[tuple[torch.dtype, bool]]

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Scaled.seen = [(x.dtype, torch.is_autocast_enabled("cuda"))]
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Scaled.seen.append((gradient.dtype, torch.is_autocast_enabled("cuda")))
        return gradient * 2


def test_functions_that_cast_their_inputs() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with auditor.emulate():
        with torch.autocast("cuda", dtype=FP16):
            low = x.mm(x)
            result = Scaled.apply(low)
        result.sum().backward()
    assert (low.dtype, result.dtype) == (FP16, WIDE)
    assert Scaled.seen == [(WIDE, False), (WIDE, False)]
