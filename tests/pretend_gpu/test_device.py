"""What makes the pretend GPU one: its devices do not mix, its memory ends, its autocast is CUDA's, its FP32 may be TF32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.devices import choose
from auditor.errors import AuditorError
from auditor.isolation.process import ieee
from tests.pretend_gpu.memory import ALLOCATOR
from tests.pretend_gpu.natively import natively


@natively
def test_devices_do_not_mix() -> None:
    here, there, host = torch.ones(2, device="pretend"), torch.ones(2, device="pretend:1"), torch.ones(2)
    for a, b in ((here, there), (here, host), (host, there)):
        with pytest.raises(RuntimeError, match="same device"):
            a + b
    assert (here + torch.tensor(1.0)).tolist() == [2, 2]


@natively
def test_memory_is_given_back_and_ends() -> None:
    before = list(ALLOCATOR.used)
    held = torch.ones(1000, device="pretend:1")
    assert ALLOCATOR.used[1] == before[1] + 4000
    view = held[10:]
    del held
    assert ALLOCATOR.used[1] == before[1] + 4000
    del view
    assert ALLOCATOR.used == before
    ALLOCATOR.limit = before[0] + 100
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1000, device="pretend")
    finally:
        ALLOCATOR.limit = None


@natively
def test_autocast_is_cudas() -> None:
    x, layer = torch.ones(2, 4, device="pretend"), nn.Linear(4, 4).to("pretend")
    with torch.autocast("pretend", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert layer(x).softmax(-1).dtype == torch.float32
        assert nn.LSTM(4, 4).to("pretend")(x)[0].dtype == torch.float16
        with torch.autocast("pretend", enabled=False):
            assert layer(x).dtype == torch.float32


@natively
def test_fp32_is_tf32_unless_the_flags_say_otherwise() -> None:
    x, weight = torch.full((1, 1, 4, 4), 1 + 2.0**-12), torch.ones(1, 1, 1, 1)
    exact = torch.conv2d(x, weight)
    assert not torch.equal(torch.conv2d(x.to("pretend"), weight.to("pretend")).cpu(), exact)
    with ieee():
        assert torch.equal(torch.conv2d(x.to("pretend"), weight.to("pretend")).cpu(), exact)


@natively
def test_a_recurrent_layer_has_a_way_back_in_training_alone() -> None:
    layer = nn.GRU(4, 4).to("pretend")
    x = torch.ones(2, 4, device="pretend", requires_grad=True)
    layer(x)[0].sum().backward()
    assert x.grad is not None
    with pytest.raises(RuntimeError, match="training mode"):
        layer.eval()(x)[0].sum().backward()


@natively
def test_a_device_that_is_not_there_is_named() -> None:
    assert choose("pretend") == "pretend:0" and choose(torch.device("pretend", 1)) == "pretend:1"
    with pytest.raises(AuditorError, match="pretend:0, pretend:1 alone") as caught:
        choose("pretend:2")
    assert caught.value.slug == "no-cuda"
