"""Which kernels there are is asked of the device where there is one, and of the tables where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.numerics.nodes import operation_of
from auditor.numerics.operations import operation
from auditor.resources import table
from tests.pretend_gpu.natively import natively
from tests.pretend_gpu.same import differences
from tests.support.opinfo import HALVES
from tests.support.subjects import normal, seeded

aten = torch.ops.aten


class Angles(nn.Module):
    """Operations that CUDA has no half kernel for, and the CPU has."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        return self.leave(hidden + hidden.angle() + torch.igamma(hidden.abs() + 1, hidden.abs()))


class Spectral(nn.Module):
    """A transform of 16 entries, a power of two."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.enter(x), norm="ortho")
        return self.leave(torch.fft.fftshift(torch.fft.irfft(spectrum * 0.5, n=16, norm="ortho").float()))


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
    model, inputs = seeded(Angles).eval(), (normal(4, 8),)
    emulated, native = (auditor.audit(model, inputs, device=device) for device in ("cpu", "pretend"))
    for audit in (emulated, native):
        for name in ("angle", "igamma"):
            (report,) = (r for r in audit.nodes if r.node.op == f"aten.{name}.default")
            assert {report.verdicts[fmt].verdict for fmt in HALVES} == {"unsafe"}
    found = differences(emulated, native)
    assert not found, found


@natively
def test_a_transform_of_a_power_of_two_runs_in_fp16_alone() -> None:
    model, inputs = seeded(Spectral).eval(), (normal(4, 16),)
    emulated, native = (auditor.audit(model, inputs, device=device) for device in ("cpu", "pretend"))
    for audit in (emulated, native):
        (report,) = (r for r in audit.nodes if r.node.op == "aten.fft_rfft.default")
        assert report.verdicts["bf16"].verdict == "unsafe", report
        assert report.verdicts["fp16"].verdict == "safe", report
    found = differences(emulated, native)
    assert not found, found
