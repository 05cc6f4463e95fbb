"""What makes the pretend GPU one, and which kernels there are: asked of the device, or of the tables where there is none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.devices import choose
from auditor.errors import AuditorError
from auditor.isolation.process import ieee
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.numerics.nodes import operation_of
from auditor.numerics.operations import operation
from auditor.resources import table
from tests.pretend_gpu.natively import natively
from tests.pretend_gpu.same import differences
from tests.support.opinfo import HALVES
from tests.support.refusing import refused
from tests.support.replaying import Model, linear
from tests.support.subjects import normal


@natively
def test_devices_do_not_mix() -> None:
    here, there, host = torch.ones(2, device="pretend"), torch.ones(2, device="pretend:1"), torch.ones(2)
    for a, b in ((here, there), (here, host), (host, there)):
        with pytest.raises(RuntimeError, match="same device"):
            a + b
    assert (here + torch.tensor(1.0)).tolist() == [2, 2]


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
def test_a_device_that_is_not_there_is_named() -> None:
    assert choose("pretend") == "pretend:0" and choose(torch.device("pretend", 1)) == "pretend:1"
    with refused(AuditorError, "no-cuda", match="pretend:0, pretend:1 only"):
        choose("pretend:2")


# Which kernels there are is asked of the device where there is one, and of the tables where there is none.

aten = torch.ops.aten


def angles(m: Any, x: Tensor) -> Tensor:
    """Operations that CUDA has no half kernel for, and the CPU has."""
    hidden = m.enter(x)
    return m.leave(hidden + hidden.angle() + torch.igamma(hidden.abs() + 1, hidden.abs()))


def spectral(m: Any, x: Tensor) -> Tensor:
    """A transform of 16 entries, a power of two."""
    spectrum = torch.fft.rfft(m.enter(x), norm="ortho")
    return m.leave(torch.fft.fftshift(torch.fft.irfft(spectrum * 0.5, n=16, norm="ortho").float()))


@natively
def test_the_device_has_the_last_word() -> None:
    x = normal(4, 4).half()
    kept = list(table("numerics/half_kernels")["missing_on_cuda"])
    try:
        table("numerics/half_kernels")["missing_on_cuda"].append("tanh")
        _forget()
        with pytest.raises(UnsupportedInFormat, match="tanh has no float16 kernel on CUDA"):
            run_op(aten.tanh.default, (x,), {})
        assert run_op(aten.tanh.default, (x.to("pretend"),), {}).dtype is torch.float16
        table("numerics/half_kernels")["missing_on_cuda"][:] = [name for name in kept if name != "angle"]
        _forget()
        run_op(aten.angle.default, (x,), {})
        with pytest.raises(UnsupportedInFormat, match="angle_cuda"):
            run_op(aten.angle.default, (x.to("pretend"),), {})
    finally:
        table("numerics/half_kernels")["missing_on_cuda"][:] = kept
        _forget()


def _forget() -> None:
    operation.cache_clear()
    operation_of.cache_clear()


@natively
def test_what_cuda_lacks_is_unsafe_natively_and_emulated() -> None:
    model, inputs = Model(angles, enter=linear(8, 8), leave=linear(8, 4)).eval(), (normal(4, 8),)
    emulated, native = (auditor.audit(model, inputs, device=device) for device in ("cpu", "pretend"))
    for audit in (emulated, native):
        for name in ("angle", "igamma"):
            (report,) = (r for r in audit.nodes if r.node.op == f"aten.{name}.default")
            assert {report.verdicts[fmt].verdict for fmt in HALVES} == {"unsafe"}
    found = differences(emulated, native)
    assert not found, found


@natively
def test_a_transform_of_a_power_of_two_runs_in_fp16_alone() -> None:
    model, inputs = Model(spectral, enter=linear(16, 16), leave=linear(16, 4)).eval(), (normal(4, 16),)
    emulated, native = (auditor.audit(model, inputs, device=device) for device in ("cpu", "pretend"))
    for audit in (emulated, native):
        (report,) = (r for r in audit.nodes if r.node.op == "aten.fft_rfft.default")
        assert report.verdicts["bf16"].verdict == "unsafe", report
        assert report.verdicts["fp16"].verdict == "safe", report
    found = differences(emulated, native)
    assert not found, found
